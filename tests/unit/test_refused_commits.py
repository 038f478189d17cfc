"""Errors that no savepoint finds: at the commit, or of the buffer's own tables. The window is tried in parts then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from bufstore.buffer.chain import Watermark
from bufstore.buffer.flush.verdict import verdict
from bufstore.buffer.ports.ledger import Cursor, Decision, FlushFailed
from bufstore.jetstream.messages import Outgoing
from unit.test_flush_faults import GOOD, Decide, poisonous, refused, state_of, write
from unit.test_flusher import SUBJECTS, Bench, bench, failing

MANY = [f"many{n}" for n in range(150)]


class Flush:
    """One flush transaction that was asked for: the cursors that fence it, and what it was to write."""

    def __init__(self, held: Sequence[Cursor], decision: Decision) -> None:
        self.partitions = {cursor.partition for cursor in held}
        self.decision = decision
        self.threads = {change.thread_id for change in decision.batch} | {p.item.thread_id for p in decision.parked}


def at_commit(it: Bench, fails: Callable[[Flush], FlushFailed | None]) -> list[Flush]:
    """Have transactions fail as a whole, when everything is written. Returns all of them, as they come."""
    flush, asked = it.ledger.flush, list[Flush]()

    async def failing_flush(held: Sequence[Cursor], threads: Sequence[str], decide: Decide, **bounds: int) -> Any:
        def decide_and_fail(watermarks: Mapping[str, Watermark]) -> Decision:
            one = Flush(held, decide(watermarks))
            asked.append(one)
            if (error := fails(one)) is not None:
                raise error
            return one.decision

        return await flush(held, threads, decide_and_fail, **bounds)

    it.ledger.flush = failing_flush  # type: ignore[method-assign]
    return asked


def error_at_commit(state: str) -> FlushFailed:
    return FlushFailed(f"the commit fails (SQLSTATE {state})", verdict(state), cause=state, of_batch=False)


def unexpected(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The errors that nobody thought of: the flusher goes on after each, and a test would not notice."""
    return [r.message for r in caplog.records if r.exc_info]


@pytest.mark.parametrize("count", [1, 5])
def test_poison_that_fails_only_the_commit_is_parked_alone(count: int) -> None:
    async def main(it: Bench) -> None:
        asked = at_commit(it, lambda f: error_at_commit("23503") if any(map(poisonous, f.decision.batch)) else None)
        bad = [f"bad{n}" for n in range(count)]
        await write(it, [*bad, *GOOD])
        await write(it, bad, "poison")
        await write(it, bad, "behind it")
        await it.start()
        assert await it.flushed(*bad, *GOOD, within_s=5.0)
        assert len(it.ledger.parked.entries) == 2 * count
        assert [await it.stored(t) for t in [*bad, *GOOD]] == [["m"]] * (count + len(GOOD))
        assert count > 1 or len(asked) < len(GOOD), "halves are tried, and not one thread after the other"

    bench(main)


@pytest.mark.parametrize("state", ["P0001", "55P03", "42501"])
def test_what_fails_the_commit_of_one_thread_delays_its_own_partition_at_most(state: str) -> None:
    async def main(it: Bench) -> None:
        bad = True
        at_commit(it, lambda f: error_at_commit(state) if bad and "t" in f.threads else None)
        await write(it, ["t", *GOOD])
        await it.start()
        others = [t for t in GOOD if state == "P0001" or SUBJECTS.partition(t) != SUBJECTS.partition("t")]
        if state != "42501":  # who may not write to the buffer's own tables flushes nothing, and an operator is told
            assert await it.flushed(*others, within_s=5.0)
        await asyncio.sleep(1)
        assert state in state_of(it).trouble
        assert state_of(it).stopped == (state == "42501")
        bad = False
        assert await it.flushed("t", *GOOD, within_s=30.0)
        assert not it.ledger.parked.entries
        assert [await it.stored(t) for t in ["t", *GOOD]] == [["m"]] * (1 + len(GOOD))

    bench(main)


def test_what_fails_every_commit_parks_nothing_and_mends_by_itself() -> None:
    async def main(it: Bench) -> None:
        bad = True
        asked = at_commit(it, lambda f: error_at_commit("23514") if bad and f.decision.batch else None)
        await write(it, MANY)
        await it.start()
        await asyncio.sleep(20)
        assert not it.ledger.parked.entries
        tried = len(asked)
        await asyncio.sleep(20)
        assert len(asked) - tried < 2 * len(MANY), "a few are tried every two seconds, and not all each time"
        bad = False
        assert await it.flushed(*MANY, within_s=30.0)
        assert not it.ledger.parked.entries

    bench(main)


def test_of_the_threads_with_poison_as_many_are_parked_as_there_is_space_for(caplog: pytest.LogCaptureFixture) -> None:
    async def main(it: Bench) -> None:
        it.ledger._quarantine_max = 2
        failing(it, lambda c: refused("22021") if poisonous(c) else None)
        bad = ["bad1", "bad2", "bad3"]
        await write(it, GOOD)
        await write(it, bad, "poison")
        await it.start()
        assert await it.flushed(*GOOD, within_s=5.0)
        await asyncio.sleep(20)
        parked = {entry.thread_id for entry in it.ledger.parked.entries.values()}
        assert len(parked) == 2
        assert "quarantine" in state_of(it).trouble
        assert [r.action for r in caplog.records].count("quarantine_full") == 1  # type: ignore[attr-defined]
        await it.writer.append(["later"], GOOD[0])
        assert await it.flushed(GOOD[0], within_s=5.0)
        await it.ledger.parked.discard(list(it.ledger.parked.entries))
        assert await it.flushed(*bad, within_s=100.0)
        assert {entry.thread_id for entry in it.ledger.parked.entries.values()} == {*bad} - parked
        assert not unexpected(caplog)

    bench(main)


def test_what_a_thread_would_park_at_once_is_parked_whole_or_waits(caplog: pytest.LogCaptureFixture) -> None:
    async def main(it: Bench) -> None:
        failing(it, lambda c: refused("22021") if poisonous(c) else None)
        await it.writer.append(["poison"], "t")
        await it.start()
        assert await it.flushed("t")
        it.ledger._quarantine_max = 2
        await it.stop()
        for n in range(2):
            await it.writer.append([f"behind it {n}"], "t")
        await it.start()
        await write(it, GOOD)
        assert await it.flushed(*GOOD, within_s=5.0)
        assert len(it.ledger.parked.entries) == 1
        it.ledger._quarantine_max = 3
        assert await it.flushed("t", within_s=100.0)
        assert len(it.ledger.parked.entries) == 3
        assert not unexpected(caplog)

    bench(main)


@pytest.mark.parametrize("thread_id", ["t", None])
def test_what_was_given_up_in_the_middle_of_a_window_is_not_committed_without_its_fence(
    thread_id: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else may have the partition by then: only its cursor, with the term, keeps a commit out."""

    async def main(it: Bench) -> None:
        partition = SUBJECTS.partition(thread_id) if thread_id is not None else 0
        given_up = False

        def give_up(flush: Flush) -> FlushFailed | None:
            nonlocal given_up
            if given_up or thread_id not in flush.threads:
                return None
            given_up = True
            assert it.flusher is not None
            it.flusher._takeover.drop(it.flusher._takeover.owned_partitions[partition], "it is in doubt")
            return error_at_commit("P0001")

        asked = at_commit(it, give_up)
        await write(it, ["t", *GOOD])
        it.log.stream.store([Outgoing(SUBJECTS.groups, b"junk", "no group")])
        await it.start()
        assert await it.flushed("t", *GOOD)
        await asyncio.sleep(5)
        assert given_up
        for flush in asked:
            concerned = {SUBJECTS.partition(t) if t is not None else 0 for t in flush.threads}
            assert concerned <= flush.partitions
        assert len(it.ledger.parked.entries) == 1
        assert not unexpected(caplog)

    bench(main)
