"""How far a streaming query is behind."""

from __future__ import annotations

from bufstore.spark.progress import lag_of


def test_lag_is_told_of_logs_only() -> None:
    def at(position: int) -> str:
        return f'{{"created":"c","position":{position}}}'

    assert lag_of([(at(5), at(9)), ("{}", "{}"), (None, None)]) == 4
    assert lag_of([("0", "5")]) is None
