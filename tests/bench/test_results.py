"""The files of a run, and rows that are run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parent.parent.parent


def test_rows_that_are_run_again_replace_theirs_and_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(_ROOT))
    from bench.results import compared, write

    def figure(name: str, ours: float) -> Any:
        return compared(name, "1/s", {"ours": [ours, ours], "other": [2.0]})

    def found() -> tuple[Any, Any]:
        return (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("latest", "rounds"))  # type: ignore[return-value]

    write(tmp_path, {"cores": 2}, [figure("a.rate", 1.0), figure("b.rate", 4.0)])
    for ours in (6.0, 8.0):
        write(tmp_path, {"cores": 2, "conversations": "generated"}, [figure("a.rate", ours)], ["a"])
        latest, rounds = found()
        assert latest["machine"] == {"cores": 2, "conversations": "generated", "again": ["a"]}
        assert [(b["name"], b["ours"], b["ratios"]["other"]) for b in latest["benchmarks"]] == [
            ("a.rate", ours, ours / 2),
            ("b.rate", 4.0, 2.0),
        ]
        assert rounds == {"a.rate": {"ours": [ours] * 2, "other": [2.0]}, "b.rate": {"ours": [4.0] * 2, "other": [2.0]}}
