"""What a process forgets of the log, by floors that owners announce, that may be lost, and that are announced again."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from bufstore import BufferedThreadStore, Consistency, LogConfig, LogUnavailable, MemoryThreadStore
from bufstore.buffer.groups import heads
from bufstore.buffer.groups.group import Draft, NewEntry, hash_of
from bufstore.buffer.groups.heads import Heads
from bufstore.buffer.groups.tail import Tail
from bufstore.buffer.places import first_place, place
from bufstore.buffer.ports.log import Floor
from bufstore.config import BufferConfig
from bufstore.errors import Closed
from bufstore.jetstream.messages import Part, StoredMessage
from bufstore.memory import MemoryNats
from helpers import fresh, run_of
from unit.fake_log import run
from unit.test_buffered_in_memory import instance

WINDOWS: dict[str, Any] = {"log": LogConfig(failover_window_s=20.0), "retain_after_flush_s": 20.0}
STAYS: dict[str, Any] = {"log": LogConfig(failover_window_s=20.0), "retain_after_flush_s": 3600.0}
MANY = 30


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_LITTLE", MANY - 5)


async def write_many(store: BufferedThreadStore, name: str) -> None:
    """Write enough threads that a process looks whether it may forget some."""
    await asyncio.gather(*(store.checkpoint(t := f"{name}-{n}", [n], run_of(t)) for n in range(MANY)))


def known(store: BufferedThreadStore, thread_id: str) -> int:
    """The place of the thread's last entry, as far as the process remembers it."""
    return store.buffer.log.known_head(store.buffer.subjects.of(thread_id))


def test_a_process_without_a_flusher_forgets_what_is_flushed() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with instance(nats, inner, **WINDOWS), instance(nats, inner, flusher=False, **WINDOWS) as app:
            floors, failures = app.buffer.shared.floors, [LogUnavailable("away"), RuntimeError("a bug")]

            async def failing() -> dict[int, Floor]:
                if failures:
                    raise failures.pop(0)
                return await floors()

            await write_many(app, "a")
            app.buffer.shared.floors = failing  # type: ignore[method-assign]
            assert known(app, "a-0")
            for name in "bcd":  # one round is not enough, because the latest groups stay in memory
                await asyncio.sleep(120)
                await write_many(app, name)
            await asyncio.sleep(120)
            assert not failures
            assert not known(app, "a-0")
            await app.checkpoint_append("a-0", [1], run_of("a-0", 1), expected_version=1)
            assert await app.load_messages("a-0", consistency=Consistency.STRONG) == [0, 1]

    run(main())


def test_a_process_asks_nobody_what_it_may_forget_while_it_remembers_little() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with instance(nats, inner, **WINDOWS), instance(nats, inner, flusher=False, **WINDOWS) as app:
            await app.checkpoint("t", [1], run_of("t"))
            shared: Any = app.buffer.shared
            before = shared.calls
            await asyncio.sleep(600)
            assert shared.calls == before
            await write_many(app, "a")
            await asyncio.sleep(120)
            before = shared.calls
            await asyncio.sleep(600)
            assert shared.calls == before, "everything of it is forgotten, or nothing has changed since"

    run(main())


def test_what_a_process_forgot_that_others_have_written_to_it_builds_on_no_more() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with (
            instance(nats, inner, **WINDOWS) as other,
            instance(nats, inner, flusher=False, **WINDOWS) as app,
        ):
            await app.checkpoint(thread_id, [1], run_of(thread_id))
            await other.checkpoint_append(thread_id, [2], run_of(thread_id, 1))
            for name in "abc":
                await write_many(app, name)
                await asyncio.sleep(120)
            assert not known(app, thread_id)
            await app.checkpoint_append(thread_id, [3], run_of(thread_id, 2))
            await other.force_flush_all()
            assert await inner.load_messages(thread_id) == [1, 2, 3]
            assert await other.quarantined() == 0

    run(main())


def test_a_lookup_that_takes_longer_than_the_log_takes_to_forget_something_counts() -> None:
    """A busy log forgets something every few seconds, though nothing of this thread."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner, **WINDOWS) as other:
            await other.checkpoint(thread_id, [1], run_of(thread_id))
            await write_many(other, "a")
            await asyncio.sleep(120)
            async with instance(nats, inner, **WINDOWS) as app:
                joined, asked = app.buffer.reads.joined, 0

                async def slow(thread_id: str) -> Any:
                    nonlocal asked
                    asked += 1
                    found = await joined(thread_id)
                    await asyncio.sleep(8)
                    return found

                async def busy() -> None:
                    for n in itertools.count():
                        await other.checkpoint("busy", [n], run_of("busy", n))
                        await asyncio.sleep(0.5)

                writer = asyncio.create_task(busy())
                await asyncio.sleep(120)
                life = app.buffer.appender._life
                app.buffer.reads.joined = slow  # type: ignore[assignment,method-assign]
                await app.checkpoint_append(thread_id, [{"id": "2"}], run_of(thread_id, 1))
                assert app.buffer.appender._life > life, "it did forget something meanwhile"
                assert asked == 1
                writer.cancel()
                await app.force_flush_all()
            assert await inner.load_messages(thread_id) == [1, {"id": "2"}]

    run(main())


def test_a_lookup_that_is_older_than_what_was_forgotten_is_made_again() -> None:
    """The caller that began the look-up has given up, and a later caller gets its answer."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner, **WINDOWS) as other:
            await other.checkpoint(thread_id, [1], run_of(thread_id))
            await write_many(other, "a")
            await asyncio.sleep(120)
            async with instance(nats, inner, flusher=False, **WINDOWS) as app:
                joined, go_on = app.buffer.reads.joined, asyncio.Event()

                async def slow(thread_id: str) -> Any:
                    found = await joined(thread_id)
                    await go_on.wait()
                    return found

                app.buffer.reads.joined = slow  # type: ignore[assignment,method-assign]
                with pytest.raises(LogUnavailable):
                    await app.checkpoint_append(thread_id, [{"id": "0"}], run_of(thread_id, 1))
                await other.checkpoint_append(thread_id, [2], run_of(thread_id, 2))
                for name in "abc":
                    await write_many(app, name)
                    await asyncio.sleep(120)
                assert not known(app, thread_id)
                second = asyncio.create_task(app.checkpoint_append(thread_id, [{"id": "3"}], run_of(thread_id, 3)))
                await asyncio.sleep(1)
                go_on.set()
                await second
                await other.force_flush_all()
                assert await other.quarantined() == 0
            assert await inner.load_messages(thread_id) == [1, 2, {"id": "3"}]

    run(main())


def lose_floors(nats: MemoryNats) -> Any:
    """Remove the owners' floors from the shared state. Returns the bucket."""
    (bucket,) = nats.buckets.values()
    for partition in bucket.keys("floor"):
        bucket.remove("floor", partition)
    return bucket


def test_a_postgres_that_was_restored_to_long_ago_gets_what_it_missed_once_the_bucket_is_gone() -> None:
    """The floors say that every copy of Postgres has them, which is now false (OPERATIONS, Going back in time)."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner, **STAYS) as one:
            await one.checkpoint(thread_id, [1], run_of(thread_id))
            await one.force_flush_all()
            ledger: Any = one.buffer.ledger
            parts = ledger._rows, ledger._cursors, inner._messages, inner._threads
            copies = [dict(part) for part in parts]
            await one.checkpoint_append(thread_id, [2], run_of(thread_id, 1))
            for name in "abc":
                await write_many(one, name)
                await asyncio.sleep(60)
            assert not known(one, thread_id)
        for part, copy in zip(parts, copies, strict=True):
            part.clear()
            part.update(copy)
        lose_floors(nats)
        async with instance(nats, inner, **STAYS), instance(nats, inner, flusher=False, **STAYS) as app:
            assert await app.load_messages(thread_id) == [1, 2]
            await app.checkpoint_append(thread_id, [3], run_of(thread_id, 2))
            await app.force_flush_all()
            assert await inner.load_messages(thread_id) == [1, 2, 3]
            assert await app.quarantined() == 0

    run(main())


def test_what_owners_said_is_said_again_when_it_was_lost_though_nothing_moves() -> None:
    async def main() -> None:
        nats = MemoryNats()
        async with instance(nats, MemoryThreadStore(), **STAYS) as store:
            await store.checkpoint("t", [1], run_of("t"))
            await asyncio.sleep(120)
            before = await store.buffer.shared.floors()
            settled = await store.buffer.log.settled()
            bucket = lose_floors(nats)
            await asyncio.sleep(20)
            assert len(bucket.keys("floor")) == store.buffer.subjects.partitions
            assert await store.buffer.shared.floors() == before
            assert await store.buffer.log.settled() == settled

    run(main())


@pytest.mark.parametrize("flusher", [False, True])
def test_who_starts_after_an_erasure_goes_on_though_what_owners_said_is_lost(*, flusher: bool) -> None:
    async def main() -> None:
        nats, inner, gone, other, last = MemoryNats(), MemoryThreadStore(), fresh(), fresh(), fresh()
        async with instance(nats, inner, **STAYS) as store:
            await store.checkpoint(other, ["a"], run_of(other))
            # These are one group, which the erasure removes.
            await asyncio.gather(
                store.checkpoint(gone, ["secret"], run_of(gone)),
                store.checkpoint_append(other, ["b"], run_of(other, 1)),
            )
            await store.checkpoint(last, ["behind"], run_of(last))
            await store.erase(gone)
        lose_floors(nats)
        async with asyncio.timeout(60), instance(nats, inner, flusher=flusher, **STAYS) as app:
            await app.checkpoint_append(other, ["c"], run_of(other, 2))
            await app.checkpoint(gone, ["new"], run_of(gone, 1))
            assert await app.load_messages(other) == ["a", "b", "c"]
            assert await app.load_messages(gone) == ["new"]
        async with instance(nats, inner, **STAYS) as last_one:
            await last_one.force_flush_all()
            assert await inner.load_messages(other) == ["a", "b", "c"]
            assert await last_one.quarantined() == 0

    run(main())


def test_a_process_that_begins_while_groups_are_erased_looks_again_with_a_pause() -> None:
    async def main() -> None:
        drafts = [Draft(100 + n, [NewEntry(f"t{n}", 0, 0, None, b"")]) for n in range(3)]
        groups, before, before_id = [], 0, 0
        for seq, draft in enumerate(drafts, 1):
            group = draft.stored(seq, before_id, before, 0)
            groups.append(StoredMessage("g", seq, draft.header(before_id, before, 0), draft.body))
            before, before_id = seq, group.id
        left = [groups[0], groups[2]]
        floors = [0, 0, first_place(3), 0, first_place(3), first_place(3)]

        class Log:
            async def last(self, *_: Any) -> dict[str, StoredMessage]:
                return {"g": left[-1]}

            connections = 1

            async def part(self, _: str, seq: int, *__: Any) -> Part:
                return Part([m for m in left if m.seq > seq], 0)

            async def identity(self, seq: int) -> StoredMessage | None:
                raise AssertionError

        async def floor() -> int:
            return floors.pop(0)

        seen = Heads()
        loop = asyncio.get_running_loop()
        await Tail(Log(), "g", seen, floor, lambda: None, 1.0).see_all()
        assert not floors
        assert seen.head(hash_of("t2")) == place(3, 0)
        assert loop.time() > 0

    run(main())


def test_what_was_only_told_is_not_kept_because_groups_were_lost_before_it() -> None:
    async def main() -> None:
        drafts = {seq: Draft(100 + seq, [NewEntry(f"t{seq}", 0, 0, None, b"")]) for seq in range(1, 6)}
        # Group 2 is lost, and group 4 was announced but never stored.
        behind = {1: 0, 3: 2, 4: 3, 5: 3}
        headers = {seq: drafts[seq].header(100 + before if before else 0, before, 0) for seq, before in behind.items()}
        left = [StoredMessage("g", seq, headers[seq], drafts[seq].body) for seq in (1, 3, 5)]

        class Log:
            connections = 1

            async def last(self, *_: Any) -> dict[str, StoredMessage]:
                return {"g": left[-1]}

            async def part(self, _: str, seq: int, *__: Any) -> Part:
                if seq == 3 and not seen.head(hash_of("t4")):
                    assert tail.hear(4, headers[4], len(drafts[4].body), drafts[4].body) == 104
                return Part([m for m in left if m.seq > seq], 0)

            async def identity(self, seq: int) -> StoredMessage | None:
                raise AssertionError

        async def floor() -> int:
            return first_place(1)

        seen, log = Heads(), Log()
        tail = Tail(log, "g", seen, floor, lambda: None, 1.0)  # type: ignore[arg-type]
        await tail.see_all()
        assert [seen.head(hash_of(f"t{seq}")) for seq in (4, 5)] == [0, place(5, 0)]

    run(main())


def test_closing_ends_a_look_at_the_log() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        settings = BufferConfig(flusher=False, append_timeout_s=1.0)
        async with instance(nats, inner) as one:
            store = await BufferedThreadStore.open(inner, nats=nats, config=settings)
            await one.checkpoint("t", [1], run_of("t"))
            stream: Any = store.buffer.session.stream  # type: ignore[attr-defined]

            async def never(*_: Any, **__: Any) -> None:
                await asyncio.Event().wait()

            stream.part = never
            looks = [asyncio.create_task(store.buffer.log.partition_ends()) for _ in range(2)]
            await asyncio.sleep(1)
            looks.append(asyncio.create_task(store.buffer.log.partition_ends()))
            await asyncio.sleep(0)
            await store.aclose()
            for look in looks:
                with pytest.raises(Closed):
                    await look
            with pytest.raises(Closed):
                await store.buffer.log.partition_ends()

    run(main())
