"""Repair on a log in memory: it finds by ids what Postgres lacks, some threads at a time."""

from __future__ import annotations

import asyncio
import copy
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from bufstore import (
    AlreadyExists,
    BufferConfig,
    BufferedThreadStore,
    Children,
    ConfigDrift,
    ConfigError,
    Consistency,
    LogConfig,
    MemoryThreadStore,
    StoreUnavailable,
)
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.operate import repair
from bufstore.buffer.operate.repair import Repair, Repaired
from bufstore.buffer.operate.replay import Outcome
from bufstore.buffer.places import group_of
from bufstore.buffer.ports.ledger import FlushFailed
from bufstore.memory import MemoryNats
from bufstore.threads.behind import buffer_of
from bufstore.threads.model import ThreadChange
from helpers import fresh, run_of
from unit.fake_log import run
from unit.test_buffered_in_memory import instance

THREADS, ROUNDS = 40, 6


def tables(inner: MemoryThreadStore) -> list[dict[Any, Any]]:
    ledger = inner.ledger(0)
    return [inner._threads, inner._messages, ledger._rows, ledger._cursors]


def restore(inner: MemoryThreadStore, copies: Sequence[dict[Any, Any]]) -> None:
    for table, kept in zip(tables(inner), copies, strict=True):
        table.clear()
        table.update(kept)


async def written(nats: MemoryNats, inner: MemoryThreadStore, threads: Sequence[str], rounds: range) -> None:
    """Write a message to each thread in each round; the messages of a round are one group."""
    async with instance(nats, inner) as store:
        for n in rounds:
            await asyncio.gather(*(store.checkpoint_append(t, [f"{t} {n}"], run_of(t, n)) for t in threads))
        await store.force_flush_all()


@pytest.mark.parametrize("share_bytes", [1 << 30, 20_000, 1], ids=["at once", "in shares", "one by one"])
def test_what_postgres_lost_comes_from_the_log_whatever_fits_into_memory(
    share_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "_SHARE_BYTES", share_bytes)
    monkeypatch.setattr(repair, "_CHUNK", 7)

    async def main() -> None:
        nats, inner, threads = MemoryNats(), MemoryThreadStore(), [fresh() for _ in range(THREADS)]
        await written(nats, inner, threads, range(2))
        copies = [dict(table) for table in tables(inner)]
        await written(nats, inner, threads, range(2, ROUNDS))
        restore(inner, copies)
        buffer = buffer_of(inner, nats, BufferConfig(flusher=False), name="repair")
        async with buffer.connected():
            lacking = THREADS * (ROUNDS - 2)
            found = await Repair(buffer.parts, "it went back").look()
            assert (found.done, found.threads, found.applied, found.parked) == (False, THREADS, lacking, 0)
            done = await Repair(buffer.parts, "it went back").carry_out()
            assert (done.done, done.applied, done.parked, done.epoch) == (True, lacking, 0, 1)
            assert "THREADLOG" not in nats.streams
            for t in threads:
                assert await inner.load_messages(t) == [f"{t} {n}" for n in range(ROUNDS)]

    run(main())


def test_an_entry_whose_predecessor_is_gone_is_parked_and_nothing_is_dropped() -> None:
    async def main() -> None:
        nats, inner, threads = MemoryNats(), MemoryThreadStore(), [fresh() for _ in range(3)]
        await written(nats, inner, threads, range(2))
        copies = [dict(table) for table in tables(inner)]
        await written(nats, inner, threads, range(2, ROUNDS))
        restore(inner, copies)
        stream = nats.streams["THREADLOG"]
        buffer = buffer_of(inner, nats, BufferConfig(flusher=False), name="repair")
        async with buffer.connected():
            groups = sorted({group_of(m.seq) async for _, m in buffer.log.scan()})
            stream.remove(groups[3])
            done = await Repair(buffer.parts, "it went back").carry_out()
            assert (done.applied, done.parked) == (len(threads), (ROUNDS - 4) * len(threads))
            assert await buffer.ledger.quarantined() == done.parked

    run(main())


class Picky(MemoryThreadStore):
    """A store that refuses messages with the word poison."""

    async def apply(self, connection: object, batch: Sequence[ThreadChange]) -> None:
        if any(b"poison" in message for change in batch for message in change.messages):
            raise AlreadyExists("refused")
        await super().apply(connection, batch)


@asynccontextmanager
async def repairing(nats: MemoryNats, inner: MemoryThreadStore) -> AsyncIterator[Repair]:
    buffer = buffer_of(inner, nats, BufferConfig(flusher=False), name="repair")
    async with buffer.connected():
        yield Repair(buffer.parts, "it went back")


def test_a_thread_of_which_nothing_is_applied_is_saved_also_if_its_last_entry_cannot_be_read() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner, flusher=False) as store:
            for n in range(3):
                last = await store.checkpoint_append(thread_id, [n], run_of(thread_id, n))
        stream = nats.streams["THREADLOG"]
        (at,) = [i for i, m in enumerate(stream.messages) if m.seq == group_of(last.thread_seq)]
        message = stream.messages[at]
        damaged = msgspec.structs.replace(message, body=message.body[:-1] + bytes([message.body[-1] ^ 1]))
        stream.messages[at] = damaged
        stream._of_subject[message.subject][-1] = damaged
        async with repairing(nats, inner) as repair:
            done = await repair.carry_out()
        assert (done.applied, done.parked) == (2, 1)
        assert await inner.load_messages(thread_id) == [0, 1]

    run(main())


def test_a_repair_that_goes_entry_by_entry_may_be_interrupted_and_parks_nothing_that_is_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Postgres remembers the keys of a thread's last 16 entries, and there are more."""
    entries, refused, stopped_before = 40, 30, 29

    async def main() -> None:
        nats, thread_id = MemoryNats(), fresh()
        inner = Picky()
        async with instance(nats, inner, flusher=False) as store:
            for n in range(1, entries + 1):
                said = ["poison" if m == refused else m for m in range(1, n + 1)]
                await store.checkpoint(thread_id, said, run_of(thread_id, n))
        commit, alone = Repair._commit, 0

        async def stopping(self: Repair, thread_id: str | None, items: Sequence[Any], *args: Any, **more: Any) -> None:
            nonlocal alone
            alone += len(items) == 1
            if alone == stopped_before:
                raise StoreUnavailable("it was restarted")
            await commit(self, thread_id, items, *args, **more)

        with monkeypatch.context() as patched:
            patched.setattr(Repair, "_commit", stopping)
            async with repairing(nats, inner) as repair:
                with pytest.raises(StoreUnavailable):
                    await repair.carry_out()
        async with repairing(nats, inner) as repair:
            done = await repair.carry_out()
        assert (done.applied, done.parked) == (refused - stopped_before, entries - refused + 1)

    run(main())


def test_of_two_repairs_the_first_ends_with_an_error_and_leaves_the_new_log_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        nats, inner, thread_id, new = MemoryNats(), MemoryThreadStore(), fresh(), fresh()
        await written(nats, inner, [thread_id], range(1))
        here, go_on = asyncio.Event(), asyncio.Event()
        report = Repair._report

        async def waiting(self: Repair, *, done: bool) -> Repaired:
            found = await report(self, done=done)
            if self is slow:
                here.set()
                await go_on.wait()
            return found

        monkeypatch.setattr(Repair, "_report", waiting)
        async with repairing(nats, inner) as slow, asyncio.TaskGroup() as tasks:

            async def ends_with_an_error() -> None:
                with pytest.raises(ConfigError, match="another repair"):
                    await slow.carry_out()

            tasks.create_task(ends_with_an_error())
            await here.wait()
            async with repairing(nats, inner) as fast:
                assert (await fast.carry_out()).done
            async with instance(nats, inner, flusher=False) as store:
                await store.checkpoint(new, ["acknowledged"], run_of(new))
            go_on.set()
        async with instance(nats, inner) as store:
            assert await store.load_messages(new) == ["acknowledged"]

    run(main())


def test_a_repair_of_a_lost_log_makes_no_partitions_that_it_never_had() -> None:
    async def main() -> None:
        nats, inner, own = MemoryNats(), MemoryThreadStore(), LogConfig(partitions=2)
        async with instance(nats, inner, log=own) as store:
            await store.checkpoint(t := fresh(), [1], run_of(t))
            await store.force_flush_all()
        del nats.streams["THREADLOG"]
        async with repairing(nats, inner) as repair:  # the repair knows the defaults only
            assert (await repair.carry_out()).done
        assert set(await inner.ledger(0).cursors()) == set(range(own.partitions))

    run(main())


def test_a_new_log_has_the_partitions_of_the_old_one_while_entries_wait() -> None:
    """Regression: nobody flushed entries that waited in a partition which their thread has no longer."""

    class Holding(MemoryThreadStore):
        held = False

        async def apply(self, connection: Any, batch: Any) -> None:
            if self.held:
                raise FlushFailed("55P03", Verdict.ISOLATE)
            await super().apply(connection, batch)

    async def main() -> None:
        nats, inner, old, new = MemoryNats(), Holding(), LogConfig(partitions=8), LogConfig(partitions=4)
        t = next(t for t in iter(fresh, None) if zlib.crc32(t.encode()) % 8 > 3)
        async with instance(nats, inner, log=old) as store:
            await store.checkpoint(t, [1], run_of(t))
            await store.force_flush_all()
            inner.held = True
            await store.checkpoint(t, [1, 2], run_of(t, 1))
            await asyncio.sleep(20)
            assert (await inner.ledger(0).waiting.totals()).entries
        del nats.streams["THREADLOG"]
        async with repairing(nats, inner) as repair:
            assert (await repair.carry_out()).done
        with pytest.raises(ConfigDrift, match="partitions is 8 but 4 is configured"):
            await BufferedThreadStore.open(inner, nats=nats, config=BufferConfig(log=new))
        assert "THREADLOG" not in nats.streams
        inner.held = False
        async with instance(nats, inner, log=old) as store:
            await store.force_flush(t)
            assert await store.load_messages(t, consistency=Consistency.EVENTUAL) == [1, 2]
        del nats.streams["THREADLOG"]
        async with repairing(nats, inner) as repair:
            assert (await repair.carry_out()).done
        async with instance(nats, inner, log=new) as store:
            await store.checkpoint_append(t, [3], run_of(t, 2))
            await store.force_flush(t)
            assert await inner.load_messages(t) == [1, 2, 3]

    run(main())


def test_a_repair_takes_the_partitions_of_a_log_that_have_no_row_yet() -> None:
    """Otherwise an instance that still flushes could begin them meanwhile."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner, flusher=False) as store:
            await store.checkpoint(thread_id, [1], run_of(thread_id))
        async with repairing(nats, inner) as repair:
            assert (await repair.carry_out()).applied == 1
        assert set(await inner.ledger(0).cursors()) == set(range(LogConfig().partitions))

    run(main())


@pytest.mark.parametrize("before", ["set_epoch", "remove"])
def test_a_repair_looks_whether_it_has_the_partitions_before_each_step_that_cannot_be_undone(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another repair has taken them meanwhile."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        await written(nats, inner, [thread_id], range(1))
        async with repairing(nats, inner) as repair:
            ledger, report, told = inner.ledger(0), Repair._report, repair._shared.report
            epoch = await repair._ledger.epoch()

            async def taken() -> None:
                await ledger.take(sorted(await ledger.cursors()), "another repair")

            async def reporting(self: Repair, *, done: bool) -> Repaired:
                await taken()
                return await report(self, done=done)

            async def telling(progress: Any) -> None:
                await taken()
                await told(progress)

            if before == "set_epoch":
                monkeypatch.setattr(Repair, "_report", reporting)
            else:
                monkeypatch.setattr(repair._shared, "report", telling)
            with pytest.raises(ConfigError, match="another repair"):
                await repair.carry_out()
            assert "THREADLOG" in nats.streams
            assert (await repair._ledger.epoch() == epoch) == (before == "set_epoch")

    run(main())


def test_a_log_that_somebody_creates_while_a_lost_one_is_repaired_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        nats, inner, thread_id, new = MemoryNats(), MemoryThreadStore(), fresh(), fresh()
        await written(nats, inner, [thread_id], range(1))
        del nats.streams["THREADLOG"]
        set_epoch = type(inner.ledger(0)).set_epoch

        async def and_somebody_starts(self: Any, epoch: int) -> None:
            await set_epoch(self, epoch)
            monkeypatch.undo()
            async with instance(nats, inner, flusher=False) as store:
                await store.checkpoint(new, ["acknowledged"], run_of(new))

        monkeypatch.setattr(type(inner.ledger(0)), "set_epoch", and_somebody_starts)
        async with repairing(nats, inner) as repair:
            assert (await repair.carry_out()).done
        async with instance(nats, inner) as store:
            assert await store.load_messages(new) == ["acknowledged"]

    run(main())


def test_an_entry_that_no_replay_can_apply_names_no_parent() -> None:
    """Regression: a cascade took along a thread that had moved to another parent, after an older log was repaired."""

    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with instance(nats, inner) as store:
            for thread_id in ("A", "B", "T"):
                await store.checkpoint(thread_id, [0], run_of(thread_id))
            await store.set_parent("T", "A")
            await store.force_flush_all()
        older = copy.deepcopy(nats.streams["THREADLOG"])
        async with instance(nats, inner) as store:
            await store.set_parent("T", "B")
            for n in range(20):
                await store.checkpoint_append("T", [n], run_of("T", n + 1))
            await store.force_flush_all()
        nats.streams["THREADLOG"] = older
        async with repairing(nats, inner) as one:
            assert (await one.carry_out()).parked == 2
        async with instance(nats, inner) as store:
            outcomes = await store.quarantine.replay_thread("T")
            assert [o.outcome for o in outcomes] == [Outcome.SUPERSEDED] * 2
            await store.delete_thread("A", children=Children.CASCADE)
            left = await store.load_thread("T", quarantined="known")
            assert left is not None and left.parent_thread_id == "B"

    run(main())
