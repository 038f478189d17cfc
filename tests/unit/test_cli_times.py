"""Times that people give to commands, and that commands show."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from bufstore.cli.app import app as command_line
from bufstore.cli.operate.log_entries import Wanted, _EntryReader
from bufstore.jetstream.messages import StoredMessage
from bufstore.nats.ranges import Read


@pytest.mark.parametrize("command", [["spark", "table", "/archive", "--expire"], ["log", "entries", "--after"]])
@pytest.mark.parametrize("time", ["soon", "0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00"])
def test_a_time_that_python_does_not_have_is_wrong_usage(command: list[str], time: str) -> None:
    ran = CliRunner().invoke(command_line, [*command, time])
    assert (ran.exit_code, "a time like" in ran.output) == (2, True), ran.output


@given(stored_at_ns=st.integers(0, 1 << 62))
def test_an_entry_stands_on_one_side_of_the_time_that_is_shown_of_it(stored_at_ns: int) -> None:
    """A window up to this time and one from it on have all entries together."""
    message = Read(StoredMessage("log.groups.0", 7, None, b"no group"), stored_at_ns, 8)
    asked = []

    async def at_time(time_ns: int, log: Any) -> int:
        asked.append(time_ns)
        return 7

    async def shown() -> Any:
        reader: Any = SimpleNamespace(at_time=at_time)
        (entry,) = [e async for e in _EntryReader(reader, Wanted((), (), None, None, False))._of(message)]
        for wanted in (Wanted((), (), entry.stored_at, None, False), Wanted((), (), None, entry.stored_at, False)):
            found = [e async for e in _EntryReader(reader, wanted)._of(message)]
            assert len(found) == (wanted.after is not None)
        await _EntryReader(reader, wanted)._sequence(SimpleNamespace(), entry.stored_at, 0, above=False)  # type: ignore[arg-type]

    asyncio.run(shown())
    assert asked[0] <= stored_at_ns < asked[0] + 1000, "so the range begins with it"
