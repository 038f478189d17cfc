"""The log lost its end: who has seen what is gone goes on only if all of it was flushed, whatever others did since."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bufstore import BufferConfig, BufferedThreadStore, Consistency, LogRolledBack, MemoryThreadStore, ReadNotFresh
from bufstore.buffer.chain import Watermark
from bufstore.buffer.entry import Base, header_of
from bufstore.buffer.flush.takeover import mismatch, proven
from bufstore.buffer.lost_end import all_flushed, has_passed, remembers
from bufstore.buffer.ports.ledger import Cursor
from bufstore.buffer.ports.log import Ending
from bufstore.buffer.recent_keys import item, item_of
from bufstore.jetstream.messages import StoredMessage
from bufstore.memory import MemoryNats
from bufstore.memory.log import MemoryStream
from helpers import run_of
from unit.fake_log import run
from unit.group_server import SUBJECTS

_THREADS = [f"t{n}" for n in range(4)]
_threads = st.lists(st.sampled_from(_THREADS), max_size=6)
#: Each with whether it has a key of its own.
_writes = st.lists(st.tuples(st.sampled_from(_THREADS), st.booleans()), max_size=6)


async def opened(nats: MemoryNats, store: MemoryThreadStore, *, flusher: bool) -> BufferedThreadStore:
    config = BufferConfig(flush_interval_s=0.05, lease_s=4, flusher=flusher)
    return await BufferedThreadStore.open(store, nats=nats, config=config)


async def append(store: BufferedThreadStore, thread_id: str, message: str, *, key: bool = False) -> None:
    await store.checkpoint_append(thread_id, [message], run_of(thread_id), idempotency_key=message if key else None)


async def others(nats: MemoryNats, inner: MemoryThreadStore, write: Sequence[tuple[str, bool]]) -> None:
    """Let another process write to these threads, and flush everything; with a key it repeats what may be lost."""
    async with await opened(nats, inner, flusher=True) as other:
        for n, (thread_id, key) in enumerate(write):
            await append(other, thread_id, f"left{n}" if key else f"since{n}", key=key)
        await other.force_flush_all()


def lose_end(nats: MemoryNats, count: int) -> set[int]:
    """Remove the last messages as a server does that lost the end of its file. Returns their sequences."""
    (stream,) = nats.streams.values()
    gone = {m.seq for m in stream.messages[-count:]} if count else set()
    for seq in gone:
        MemoryStream.remove(stream, seq)
    return gone


@given(_writes, _writes, st.integers(0, 8), _writes)
@example([("t0", False)], [("t0", False)], 1, [("t0", False)])
@example([], [("t0", False), ("t1", False)], 2, [("t0", False)])
@example([("t0", False), ("t1", True)], [], 2, [("t0", False), ("t1", False)])
@example([], [("t0", False), ("t0", True)], 2, [("t0", True)])
def test_who_has_seen_the_end_goes_on_only_if_all_of_it_was_flushed(
    flushed: list[tuple[str, bool]], left: list[tuple[str, bool]], count: int, since: list[tuple[str, bool]]
) -> None:
    """`flushed` and `left` were written, then the log lost its last `count` messages, and others wrote `since`."""

    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with await opened(nats, inner, flusher=False) as app:
            for n, (thread_id, key) in enumerate(flushed):
                await append(app, thread_id, f"flushed{n}", key=key)
            await others(nats, inner, [])
            unflushed = set()
            for n, (thread_id, key) in enumerate(left):
                await append(app, thread_id, f"left{n}", key=key)
                unflushed.add(next(iter(nats.streams.values())).end)
            lost = lose_end(nats, count) & unflushed
            with suppress(LogRolledBack):  # a cursor of Postgres stood on what is gone: then nobody goes on
                await others(nats, inner, since)
            app.buffer.log._stream.connections += 1  # type: ignore[attr-defined]
            try:
                await append(app, "t9", "more")
            except LogRolledBack as e:
                assert lost
                assert "lost its end" in str(e)
                assert "more" not in (await inner.load_messages("t9") or [])
            else:
                assert not lost
            assert await _reads(app, "t9") in (["more"], [], None)

    run(main())


@given(_threads, st.lists(st.sampled_from([*_THREADS, "t9"]), max_size=15))
@example(["t0", "t1"], ["t1", "t0", "t9", "t0"])
def test_who_has_seen_what_was_flushed_and_purged_by_hand_goes_on_behind_a_running_flusher(
    flushed: list[str], since: list[str]
) -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with await opened(nats, inner, flusher=True) as other, await opened(nats, inner, flusher=False) as app:
            for n, thread_id in enumerate(flushed):
                await append(app, thread_id, f"flushed{n}")
            await other.force_flush_all()
            lose_end(nats, 100)
            for n, thread_id in enumerate(since):
                await append(other, thread_id, f"since{n}")
            await other.force_flush_all()
            await append(app, "t9", "more")
            await other.force_flush_all()
            for thread_id in [*_THREADS, "t9"]:
                written = [f"flushed{n}" for n, t in enumerate(flushed) if t == thread_id]
                written += [f"since{n}" for n, t in enumerate(since) if t == thread_id]
                written += ["more"] * (thread_id == "t9")
                assert (await inner.load_messages(thread_id) or []) == written

    run(main())


async def _reads(store: BufferedThreadStore, thread_id: str) -> object:
    try:
        return await store.load_messages(thread_id)
    except (LogRolledBack, ReadNotFresh):
        return await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)


@pytest.mark.parametrize(
    ("cursor", "passed"), [(None, False), (19, False), (20, True), (25, True), (29, True), (30, None), (99, None)]
)
def test_a_cursor_says_all_only_while_it_stands_among_what_was_seen(cursor: int | None, passed: bool | None) -> None:
    found = Cursor(0, 1, cursor, 7) if cursor is not None else None
    assert has_passed(found, 20, 29) is passed


def test_a_thread_that_others_continued_remembers_the_entry_or_does_not_say() -> None:
    entry = StoredMessage(SUBJECTS.of("a"), 20, "no header of an entry", b"")
    assert not remembers(Watermark(flushed_seq=19), 20, entry, 29)
    assert remembers(Watermark(flushed_seq=20), 20, entry, 29)
    assert remembers(Watermark(flushed_seq=10, waits_to=29), 20, entry, 29)
    assert not remembers(Watermark(flushed_seq=30), 20, entry, 29)
    ours = StoredMessage(SUBJECTS.of("a"), 20, header_of(7, 0, Base.UNKNOWN, 0, 0, False, b"", True, None, b""), b"")
    assert not remembers(Watermark(flushed_seq=30, applied_id=8, keys=item("a key", b"")), 20, ours, 29)
    assert remembers(Watermark(flushed_seq=30, applied_id=7), 20, ours, 29)
    assert remembers(Watermark(flushed_seq=30, applied_id=8, keys=item_of(7) + item_of(8)), 20, ours, 29)


async def test_an_entry_that_nobody_can_ask_about_does_not_count_as_flushed() -> None:
    class Ledger:
        async def cursors(self) -> dict[int, Cursor]:
            return {0: Cursor(0, 1, 99, 7), 1: Cursor(1, 1, 25, 7)}

    ledger: Any = Ledger()
    assert await all_flushed(ledger, SUBJECTS, {1: Ending(20, None)}, 29)
    assert not await all_flushed(ledger, SUBJECTS, {0: Ending(20, None), 1: Ending(20, None)}, 29)
    foreign = StoredMessage("of no thread", 20, None, b"")
    assert not await all_flushed(ledger, SUBJECTS, {0: Ending(20, foreign)}, 29)


async def test_what_an_old_leader_shows_beside_its_successors_proof_is_no_loss() -> None:
    """Regression: a log was refused that ended at 5 by an old leader, and behind the proof by its successor, in turns.

    The position at the cursor, which the old leader lacks, was believed to be empty in the same way.
    """

    class Log:
        generation_start = 1

        def __init__(self, *ends: int) -> None:
            self.ends = [*ends]

        async def end(self, timeout_s: float) -> int:
            return self.ends.pop(0)

        async def erased(self) -> int:
            return 0

        async def identity(self, seq: int) -> StoredMessage | None:
            return None

        async def held_at(self, seq: int) -> StoredMessage | None:
            header = header_of(7, 0, Base.UNKNOWN, 0, 0, False, b"", True, None, b"")
            return StoredMessage(SUBJECTS.of("t"), seq, header, b"")

        async def barrier(self, timeout_s: float) -> int:
            return 12

    async def found(cursor: Cursor, *ends: int) -> str | None:
        log: Any = Log(*ends)
        return await proven(log, lambda *reached: mismatch(log, cursor, *reached))

    for ends in (5, 5, 12), (5, 12, 12), (12, 5, 12), (12, 12, 12):
        assert await found(Cursor(0, 1, 9, 7), *ends) is None
    assert "ends at 12" in str(await found(Cursor(0, 1, 20, 7), 5, 5, 12))
