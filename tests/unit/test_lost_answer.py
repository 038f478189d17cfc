"""What a unit became whose answer was lost: the log's next entry of the thread says so (`...append.lost_answer`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from bufstore.buffer.append.lane import Unit, Write
from bufstore.buffer.append.lost_answer import resolve
from bufstore.buffer.append.tip import Tip
from bufstore.buffer.entry import Base
from bufstore.buffer.places import place
from bufstore.errors import BufstoreError, LogFull, LogUnavailable
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, StoredMessage
from unit.fake_log import run

SUBJECT = "thread.t"
BEFORE = place(7, 2)


class Log:
    """What the thread's log shows behind `BEFORE`, and what becomes of units that are sent again."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.entries: list[StoredMessage] = []
        #: What ends each unit that is sent, in turn; None: it is stored.
        self.outcomes = [*outcomes]
        self.looks = self.sent = 0
        #: What is stored by somebody before the second look.
        self.meanwhile: Sequence[Outgoing] = ()
        self.away: list[BufstoreError] = []

    def store(self, messages: Sequence[Outgoing]) -> int:
        seq = 8 + len(self.entries)
        self.entries += [StoredMessage(m.subject, place(seq, n), m.header, m.body) for n, m in enumerate(messages)]
        return self.entries[-1].seq

    async def after(self, subject: str, seq: int, *, limit: int) -> list[StoredMessage]:
        assert (subject, seq, limit) == (SUBJECT, BEFORE, 1)
        self.looks += 1
        if self.looks > 1 and self.meanwhile:
            self.store(self.meanwhile)
            self.meanwhile = ()
        if self.away:
            raise self.away.pop()
        return self.entries[:limit]

    async def submit(self, messages: Sequence[Outgoing]) -> int:
        self.sent += 1
        if (error := self.outcomes.pop(0)) is not None:
            raise error
        return self.store(messages)


def unit_of(count: int) -> Unit[Any]:
    """A unit of so many entries, each with a caller that waits."""
    loop = asyncio.get_running_loop()
    writes = [Write[Any](cast(Any, None), b"", False, None, n, loop.create_future(), 1e9) for n in range(count)]
    messages = [Outgoing(SUBJECT, b"body", f"entry {n}", BEFORE if not n else None) for n in range(count)]
    tip = Tip[Any](BEFORE, 1, Base.CHAINED, 0, 0, b"", None)
    return Unit(
        messages=messages, lane=cast(Any, None), writes=writes, before=tip, after=tip, on_end=lambda *_: None
    )  # fmt: skip


OTHERS = [Outgoing(SUBJECT, b"body", "another's")]


def outcome_of(log: Log, unit_size: int, *, stored: Sequence[Outgoing] | None = None, known: bool = True) -> Any:
    """What `resolve` says. `stored`: what the log has behind the predecessor; None: the unit."""

    async def main() -> Any:
        unit = unit_of(unit_size)
        if stored is None or stored:
            log.store(unit.messages if stored is None else stored)
        return await asyncio.wait_for(resolve(unit, cast(Any, log), cast(Any, log), lambda: known), 60)

    return run(main())


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_unit_that_is_there_ends_at_its_last_entry(count: int) -> None:
    log = Log()
    assert outcome_of(log, count) == place(8, count - 1) == log.entries[-1].seq
    assert not log.sent


def test_where_anothers_entry_stands_ours_can_never_be_stored() -> None:
    log = Log()
    assert isinstance(outcome_of(log, 2, stored=OTHERS), Conflict)
    assert not log.sent


@pytest.mark.parametrize("error", [AppendUnknown("lost"), LogUnavailable("away"), LogFull("full"), None])
def test_where_nothing_stands_the_same_unit_is_sent_until_it_is_stored(error: Exception | None) -> None:
    log = Log(*([error, None] if error is not None else [None]))
    assert outcome_of(log, 3, stored=()) == log.entries[-1].seq == place(8, 2)
    assert len(log.entries) == 3


def test_a_copy_that_the_first_one_was_faster_than_is_no_conflict() -> None:
    log = Log(Conflict("moved"))

    async def main() -> Any:
        unit = unit_of(3)
        log.meanwhile = unit.messages
        return await asyncio.wait_for(resolve(unit, cast(Any, log), cast(Any, log), lambda: True), 60)

    assert run(main()) == place(8, 2)
    assert log.sent == 1


def test_a_copy_that_another_was_faster_than_is_a_conflict_only_once_that_is_seen() -> None:
    log = Log(Conflict("moved"))
    log.meanwhile = OTHERS
    assert isinstance(outcome_of(log, 3, stored=()), Conflict)
    assert log.sent == 1


def test_a_log_that_is_away_is_asked_again() -> None:
    log = Log()
    log.away = [LogUnavailable("away"), LogUnavailable("away")]
    assert outcome_of(log, 2) == place(8, 1)
    assert log.looks == 3


def test_when_the_log_began_anew_an_absence_proves_nothing_and_nothing_is_sent() -> None:
    log = Log()
    log.meanwhile = OTHERS
    assert isinstance(outcome_of(log, 2, stored=(), known=False), Conflict)
    assert not log.sent and log.looks == 2


def test_once_every_caller_has_given_up_nobody_looks() -> None:
    log = Log()

    async def main() -> Any:
        unit = unit_of(2)
        for write in unit.writes:
            write.done.cancel()
        return await resolve(unit, cast(Any, log), cast(Any, log), lambda: True)

    assert run(main()) is None
    assert not (log.looks or log.sent)
