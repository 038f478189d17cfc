"""What the caller of a refused write is told."""

from __future__ import annotations

import pytest

from bufstore.buffer.append.refusals import Refusals
from bufstore.errors import LogFull
from bufstore.jetstream.errors import StorageFull, TooManyMessages


@pytest.mark.parametrize(
    ("error", "told", "health"),
    [
        (LogFull("maximum bytes exceeded"), "it holds 5 of 5 bytes", "the log is full: it has just refused a write"),
        (StorageFull("no space left"), "NATS has no storage left", "NATS has no storage left"),
        (TooManyMessages("maximum messages exceeded"), "set it to -1", "set it to -1"),
    ],
)
async def test_only_a_log_that_is_full_of_bytes_is_explained_by_them(error: LogFull, told: str, health: str) -> None:
    async def explain(found: LogFull) -> LogFull:
        return LogFull(f"{found}: it holds 5 of 5 bytes: raise LogConfig.max_bytes")

    refusals = Refusals(explain)
    assert told in str(await refusals.explained(error, 7))
    assert health in refusals.lately(7)
    assert refusals.lately(8) == "", "an entry was appended since"
