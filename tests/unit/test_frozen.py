"""Which flush counts as frozen."""

from __future__ import annotations

import pytest

from bufstore.postgres.ledger.frozen import OpenFlush, idle_max, is_frozen


@pytest.mark.parametrize(
    ("still_s", "held_s", "frozen"),
    [
        (4.1, 0.0, True),
        (3.9, 60.0, False),  # it waits for its process, and not for long yet
        (0.0, 60.0, False),  # Postgres works for it
        (None, 3.9, False),
        (None, 4.1, True),  # another role's: what we have seen ourselves must do
    ],
)
def test_a_flush_is_frozen_that_waits_for_its_process_for_longer_than_it_may(
    still_s: float | None, held_s: float, frozen: bool
) -> None:
    assert is_frozen(OpenFlush(1, "2/3", "app", 4.0, still_s), held_s) is frozen


def test_a_large_window_may_stand_still_for_longer() -> None:
    assert idle_max(6) == 4000
    assert idle_max(6, 64 << 20) == 20_000
