"""Lost, damaged and malformed groups are reported, stop nobody, and no entry is made up."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from bufstore import Consistency, MemoryThreadStore
from bufstore.buffer.entry import Malformed
from bufstore.buffer.groups import tail
from bufstore.buffer.groups.group import Group
from bufstore.buffer.places import first_place, group_of
from bufstore.jetstream.messages import Outgoing, Part, StoredMessage
from bufstore.memory import MemoryNats
from bufstore.memory.log import MemoryLog
from bufstore.threads.write import call_of
from helpers import fresh, run_of
from unit.fake_log import run
from unit.test_buffered_in_memory import instance


def test_a_lost_group_is_said_and_threads_without_entries_in_it_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        nats, inner, lost, whole = MemoryNats(), MemoryThreadStore(), fresh(), fresh()
        async with instance(nats, inner, flusher=False) as store:
            for n in range(3):
                for t in (lost, whole):
                    receipt = await store.checkpoint_append(t, [n], run_of(t, n))
                    if (t, n) == (lost, 1):
                        gone = group_of(receipt.thread_seq)
        nats.streams["THREADLOG"].remove(gone)
        # Every instance that starts now reads behind the hole.
        async with instance(nats, inner) as store:
            async with asyncio.timeout(60):
                assert await store.load_messages(whole, consistency=Consistency.STRONG) == [0, 1, 2]
                await store.checkpoint_append(whole, [3], run_of(whole, 3))
                await store.force_flush_all()
            assert await inner.load_messages(whole) == [0, 1, 2, 3]
            # An entry that builds on the lost one is parked, and not applied to another base.
            assert await inner.load_messages(lost) == [0]
            assert [p.thread_id for p in await store.quarantine.page()] == [lost]
            await store.checkpoint(lost, ["new"], run_of(lost, 4))
            await store.force_flush(lost)
            assert await inner.load_messages(lost) == ["new"]

    run(main())
    assert "log_gap" in {getattr(r, "action", None) for r in caplog.records if r.levelname == "ERROR"}


def test_groups_that_are_lost_in_several_places_stop_nobody() -> None:
    async def main() -> None:
        nats, inner, threads = MemoryNats(), MemoryThreadStore(), [fresh() for _ in range(6)]
        async with instance(nats, inner, flusher=False) as store:
            places = [(await store.checkpoint(t, [t], run_of(t))).thread_seq for t in threads]
        for gone in (1, 3, 4):
            nats.streams["THREADLOG"].remove(group_of(places[gone]))
        async with asyncio.timeout(60), instance(nats, inner) as store:
            assert await store.load_messages(fresh()) is None
            await store.force_flush_all()
            assert [await inner.load_messages(threads[n]) for n in (0, 2, 5)] == [[threads[n]] for n in (0, 2, 5)]

    run(main())


def test_a_log_that_has_lost_many_groups_is_read_twice_and_not_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, read = 400, 0

    def decoded(message: StoredMessage) -> Group | None:
        nonlocal read
        read += 1
        return decode(message)

    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with instance(nats, inner, flusher=False) as store:
            places = [(await store.checkpoint(t, [t], run_of(t))).thread_seq for t in (fresh() for _ in range(groups))]
        for place in places[100:300:10]:
            nats.streams["THREADLOG"].remove(group_of(place))
        monkeypatch.setattr(tail, "group_in", decoded)
        async with instance(nats, inner, flusher=False) as store:
            assert await store.load_messages(fresh()) is None
            assert read < 3 * groups

    decode = tail.group_in
    run(main())


def test_what_a_purge_takes_while_the_log_is_read_anew_is_not_said_to_be_lost(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with instance(nats, inner, flusher=False) as store:
            places = [(await store.checkpoint(t, [t], run_of(t))).thread_seq for t in (fresh() for _ in range(10))]
        stream, groups = nats.streams["THREADLOG"], [group_of(place) for place in places]
        stream.remove(groups[1])
        part = MemoryLog.part

        async def one(self: Any, subject: str, seq: int, timeout_s: float, limit: int, bytes_max: int = 0) -> Part:
            if seq == groups[4]:
                stream.purge(groups[7])
            return await part(self, subject, seq, timeout_s, 1, bytes_max)

        monkeypatch.setattr(MemoryLog, "part", one)
        async with instance(nats, inner, flusher=False) as store:
            assert await store.load_messages(fresh()) is None

    run(main())
    said = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(said) == 1, said


@pytest.mark.parametrize("damage", [b"entry-1", b"thread"], ids=["its payload", "its thread's id"])
def test_a_damaged_entry_takes_no_other_with_it(damage: bytes) -> None:
    async def main() -> None:
        nats, inner, threads = MemoryNats(), MemoryThreadStore(), [f"thread-{n}" for n in range(4)]
        async with instance(nats, inner, flusher=False) as store:
            await asyncio.gather(*(store.checkpoint(t, [f"entry-{t[-1]}"], run_of(t)) for t in threads))
        (at, message), *_ = [
            (i, m) for i, m in enumerate(nats.streams["THREADLOG"].messages) if m.body.count(b"entry-") == len(threads)
        ]
        begins = message.body.index(b"thread-1") if damage == b"thread" else message.body.index(damage)
        body = message.body[:begins] + b"?" + message.body[begins + 1 :]
        nats.streams["THREADLOG"].messages[at] = msgspec.structs.replace(message, body=body)
        nats.streams["THREADLOG"]._of_subject[message.subject] = [nats.streams["THREADLOG"].messages[at]]
        async with instance(nats, inner) as store:
            await store.force_flush_all()
            (parked,) = await store.quarantine.page()
            assert group_of(parked.seq) == message.seq
            assert parked.thread_id == (None if damage == b"thread" else "thread-1")
            shown = await store.quarantine.show(parked.seq)
            assert isinstance(shown.item, Malformed)
            kept = b"".join(m.body for m in shown.item.messages)
            assert b"-1" in kept
            assert not any(f"entry-{n}".encode() in kept for n in (0, 2, 3))
            for t in threads:
                assert await inner.load_checkpoint(t) is None if t == "thread-1" else await inner.load_messages(t)
            assert (await store.erase("thread-0")).log_messages == 1

    run(main())


def test_what_is_no_group_goes_to_quarantine_by_its_place() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner) as store:
            await store.checkpoint(thread_id, [0], run_of(thread_id))
            foreign = nats.streams["THREADLOG"].store([Outgoing(store.buffer.subjects.groups, b"no group")])
            await store.checkpoint_append(thread_id, [1], run_of(thread_id))
            await store.force_flush_all()
            (parked,) = await store.quarantine.page()
            assert (parked.seq, parked.thread_id) == (first_place(foreign), None)
            assert await inner.load_messages(thread_id) == [0, 1]
            assert await store.quarantine.discard([parked.seq]) == 1

    run(main())


@pytest.mark.parametrize("wrong", ["a\0b", "t" * 1025], ids=["NUL", "long"])
def test_an_entry_of_a_thread_that_no_database_could_hold_goes_to_quarantine(wrong: str) -> None:
    """Otherwise it would wait for ever, and every flush of the whole log would wait for it."""

    async def main() -> None:
        nats, inner, good = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner, flusher=False) as store:
            call = call_of(good, [1], run_of(good), None, None)
            await asyncio.gather(
                store.checkpoint(good, [0], run_of(good)), store.buffer.appender.append(wrong, call.whole_list)
            )
        async with instance(nats, inner) as store:
            await store.force_flush_all()
            (parked,) = await store.quarantine.page()
            assert parked.thread_id is None
            assert await inner.load_messages(good) == [0]

    run(main())
