"""The write path on a log that fails: whether a write is done, rejected or unknown, and what the log then holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Collection, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bufstore.buffer.append import next_unit
from bufstore.buffer.append.tip import Draft, Tip
from bufstore.buffer.chain import Watermark
from bufstore.buffer.entry import StoredEntry
from bufstore.buffer.groups import tail
from bufstore.buffer.ports.log import Floor
from bufstore.config import LogConfig, large_bytes_max
from bufstore.errors import (
    AlreadyExists,
    BufstoreError,
    Closed,
    IdempotencyConflict,
    LogFull,
    LogUnavailable,
    OutcomeUnknown,
    Rejected,
    StoreUnavailable,
    ThreadQuarantined,
    TooLarge,
    Unavailable,
    VersionConflict,
)
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, Part, StoredMessage
from bufstore.threads.model import Run
from bufstore.threads.payload import Removal
from bufstore.threads.write import editing
from bufstore.types import Receipt
from thorough import examples, seldom
from unit.fake_log import WRITE_FAULTS, JumpingLoop, run
from unit.group_server import GroupServer
from unit.write_world import SUBJECTS, Instance, World, faults, test

# --- when nothing fails -----------------------------------------------------------------------------------------


def test_a_warm_append_costs_one_call() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        for n in range(5):
            before = world.log.calls
            receipt = await one.append([n])
            assert world.log.calls == before + 1
            assert (receipt.thread_seq, receipt.version) == (world.log.last_seq, n + 2)
        assert await world.messages() == ["a", 0, 1, 2, 3, 4]

    test(main)


def test_many_callers_on_one_thread_keep_their_order_and_share_batches() -> None:
    async def main(world: World, one: Instance) -> None:
        receipts = await asyncio.gather(*(one.append([n]) for n in range(300)))
        assert [r.thread_seq for r in receipts] == sorted(r.thread_seq for r in receipts)
        assert await world.messages() == list(range(300))
        assert len(world.log.batches) < 20

    test(main)


def test_a_large_entry_is_stored_in_pieces_and_read_whole() -> None:
    async def main(world: World, one: Instance) -> None:
        big = "x" * 30_000
        await one.checkpoint([big])
        await one.append(["small"])
        assert len([m for m in world.log.stream.messages if m.subject == SUBJECTS.parts]) > 3
        assert await world.messages() == [big, "small"]

    test(main, server=GroupServer(message_bytes_max=4096))


@pytest.mark.parametrize("bytes_max", [16 << 10, 64 << 10])
def test_many_small_writes_of_a_thread_go_in_messages_as_small_as_the_server_takes(bytes_max: int) -> None:
    """Regression: the writes neither fit together nor went into parts, and the same unit was drafted for ever."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint([])
        await asyncio.gather(*(one.append([n], key=f"k{n}") for n in range(300)))
        assert sorted(await world.messages()) == list(range(300))
        assert 3 < len(world.log.batches) < 150

    test(main, server=GroupServer(message_bytes_max=bytes_max))


def test_a_large_entry_that_is_the_last_of_the_log_is_followed() -> None:
    """Retention stops at the cursor's entry, and the entry's parts are stored before it."""

    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        await one.checkpoint(["a"])
        await two.append(["x" * 10_000])
        await world.flush()
        world.log.expire_below(world.log.last_seq)
        assert (await one.append(["b"])).version == 3
        assert await world.messages() == ["a", "x" * 10_000, "b"]

    test(main, server=GroupServer(message_bytes_max=4096))


def test_a_large_entry_for_which_there_is_no_room_leaves_no_part_behind() -> None:
    """Its parts would count for nothing, and take from all others the room that is left until they are purged."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        fill = world.log.fill

        async def nearly_full() -> tuple[int, int]:
            limit = (await fill())[1]
            return large_bytes_max(limit) - 30_000, limit

        world.log.fill = nearly_full  # type: ignore[method-assign]
        with pytest.raises(LogFull, match="no room for a large entry"):
            await one.append(["x" * 30_000])
        assert not [m for m in world.log.stream.messages if m.subject == SUBJECTS.parts]
        await one.append(["b"])
        world.log.fill = fill  # type: ignore[method-assign]
        await one.append(["x" * 30_000])
        assert await world.messages() == ["a", "b", "x" * 30_000]

    test(main, server=GroupServer(message_bytes_max=4096))


def test_a_write_that_needs_no_content_does_not_fail_in_place_of_one_whose_caller_has_gone() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        two, asked, goes_on = Instance(world), asyncio.Event(), asyncio.Event()

        async def away(thread_id: str) -> Any:
            asked.set()
            await goes_on.wait()
            raise StoreUnavailable("away")

        two.reads.joined = away  # type: ignore[method-assign]
        gone = asyncio.ensure_future(two.append([{"id": "m"}]))  # only the content tells whether it has this id
        await asked.wait()
        kept = asyncio.ensure_future(two.checkpoint(["a", "b"]))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        goes_on.set()
        assert (await kept).version == 2

    test(main)


def test_many_threads_that_are_written_first_at_once_ask_postgres_together() -> None:
    async def main(world: World, one: Instance) -> None:
        for n in range(3):
            await one.checkpoint(["a"], f"t{n}")
            await world.flush(f"t{n}")
        world.log.intrude(SUBJECTS.of("elsewhere"))
        world.log.expire_below(world.log.last_seq)
        two, asked = Instance(world), list[list[str]]()

        async def held(thread_ids: Sequence[str]) -> Collection[str]:
            asked.append(sorted(thread_ids))
            return ids[:3]

        two.appender._finder._held = held
        joined, read = two.reads.joined, list[str]()

        async def counted(thread_id: str) -> Any:
            read.append(thread_id)
            return await joined(thread_id)

        two.reads.joined = counted  # type: ignore[assignment, method-assign]
        ids = [f"t{n}" for n in range(20)]
        receipts = await asyncio.gather(*(two.append(["b"], thread_id) for thread_id in ids))
        assert [r.version for r in receipts] == [2] * 3 + [1] * 17
        assert asked == [sorted(ids)]
        assert not read, "who appends what has no id needs no content"
        for thread_id in ids:
            await world.flush(thread_id)
            assert await world.messages(thread_id) == ["a", "b"][thread_id not in ids[:3] :]

    test(main)


def test_who_needs_the_content_reads_the_last_entry_only_with_it() -> None:
    """Regression: the log's last entry was looked up, and then read again with the others, a whole group each time."""

    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        await one.checkpoint(["a"])
        await two.checkpoint(["of another"], "another")
        looked_up, last = list[str](), two.log.last

        async def counted(subjects: Sequence[str]) -> dict[str, StoredMessage]:
            looked_up.extend(subjects)
            return await last(subjects)

        two.log.last = counted  # type: ignore[method-assign]
        assert (await two.append(["b"])).version == 2
        assert not looked_up
        await one.checkpoint(["c"], "third", key="k")
        assert (await two.append(["c"], "third", key="other")).version == 2
        assert set(looked_up) == {SUBJECTS.of("third")}, "what may repeat another write is answered without content"
        assert await world.messages() == ["a", "b"]

    test(main)


@pytest.mark.parametrize("flushed", ["all, and purged", "all", "some", "nothing"])
def test_who_appends_what_has_no_id_reads_no_content(flushed: str) -> None:
    """Postgres knows the version, or from where on the log knows it."""

    async def main(world: World, one: Instance) -> None:
        if flushed == "some":
            await one.checkpoint(["x"])
            await world.flush()
        await one.checkpoint([{"id": "a"}, "b"])
        if flushed == "all":
            await world.flush()
        elif flushed == "all, and purged":
            await world.flush_and_purge()
        two, read = Instance(world), list[str]()
        await two.checkpoint(["of another"], "another")
        joined, last = two.reads.joined, two.log.last

        async def counted(thread_id: str) -> Any:
            read.append("the content")
            return await joined(thread_id)

        async def looked(subjects: Sequence[str]) -> dict[str, StoredMessage]:
            read.append("the last entry")
            return await last(subjects)

        two.reads.joined, two.log.last = counted, looked  # type: ignore[assignment, method-assign]
        assert (await two.append(["c"])).version == 3
        calls = world.log.calls
        assert (await two.append(["d"])).version == 4
        assert world.log.calls == calls + 1, "its tip is known now"
        assert not read
        with pytest.raises(VersionConflict):
            await two.append(["e"], expected=3)
        with pytest.raises(AlreadyExists):
            await two.append([{"id": "a"}])
        assert read, "whether there is such an id, only the content tells"
        await two.checkpoint([{"id": "a"}, "b", "c", "e"])
        await one.append(["f"])
        assert await world.messages() == [{"id": "a"}, "b", "c", "e", "f"]

    test(main)


def test_who_was_overtaken_reads_what_came_since_and_no_content() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        two, read = Instance(world), list[str]()
        await two.checkpoint(["of another"], "another")
        await two.append(["b"])

        async def asked(*_: Any, **__: Any) -> Any:
            read.append("Postgres or the last entry")
            raise AssertionError

        two.reads.joined = two.reads.watermarks = two.log.last = asked  # type: ignore[assignment, method-assign]
        await one.append(["c"])
        assert (await two.append(["d"])).version == 4
        assert await world.messages() == ["a", "b", "c", "d"]
        assert not read

    test(main)


def _poison(tip: Tip[Any]) -> Draft[Any]:
    """An entry that no flush can apply."""
    return Draft(b"\xc1", False, tip.version + 1, tip.memory, lambda: None)


@pytest.mark.parametrize("cause", ["quarantined", "poison in the log", "poison in the log, late"])
def test_what_will_not_be_applied_is_not_appended_to(cause: str) -> None:
    """In `late` the other process already knows the thread's version. It would not hear of a late quarantine here."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.flush()
        two = Instance(world)
        await two.checkpoint(["of another"], "another")
        if cause.endswith("late"):
            await two.append(["b"])
        if cause == "quarantined":
            await _break(world, one)
        else:
            await one.appender.append("t", _poison)
        with pytest.raises(ThreadQuarantined):
            await two.append(["c"])

    test(main)


def test_behind_a_deletion_a_thread_begins_anew() -> None:
    async def main(world: World, one: Instance) -> None:
        for flushed in (False, True):
            first = await one.checkpoint(["a"])
            await world.flush()
            two = Instance(world)
            await two.checkpoint(["of another"], "another")
            await one.appender.append("t", editing(Removal(), "t", first.id))
            if flushed:
                await world.flush()
            assert (await two.append(["c"])).version == 1
            await world.flush()
            assert await world.messages() == ["c"]
            assert world.ledger.parked.entries == {}

    test(main)


@pytest.mark.parametrize("takes_s", [0.5, 3.0])
def test_a_postgres_that_is_slow_is_not_asked_for_each_thread_instead(takes_s: float) -> None:
    """When everything is slow, a question for each of many threads would be far more work than one for all."""

    async def main(world: World, one: Instance) -> None:
        read = list[str]()

        async def held(_: Sequence[str]) -> Collection[str]:
            await asyncio.sleep(takes_s)
            return ()

        async def joined(thread_id: str) -> Any:
            read.append(thread_id)
            raise StoreUnavailable("too busy")

        one.appender._finder._held, one.reads.joined = held, joined  # type: ignore[assignment, method-assign]
        await asyncio.gather(*(one.append(["a"], f"t{n}") for n in range(20)))
        assert not read

    test(main)


def test_when_postgres_cannot_say_which_threads_are_new_each_is_asked_for() -> None:
    async def main(world: World, one: Instance) -> None:
        asked = 0

        async def held(_: Sequence[str]) -> Collection[str]:
            nonlocal asked
            asked += 1
            raise StoreUnavailable("too busy")

        one.appender._finder._held = held
        for part in range(3):
            await asyncio.gather(*(one.append(["a"], f"t{part}-{n}") for n in range(10)))
        assert asked == 1, "not again and again"
        await asyncio.sleep(60)
        await asyncio.gather(*(one.append(["a"], f"later {n}") for n in range(10)))
        assert asked == 2

    test(main)


def test_what_is_too_large_is_rejected_and_its_neighbours_are_not() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        found = await asyncio.gather(
            one.append(["b"]), one.append(["x" * 5000]), one.append(["c"]), return_exceptions=True
        )
        assert isinstance(found[1], TooLarge)
        assert await world.messages() == ["a", "b", "c"]

    test(main, log=LogConfig(max_entry_bytes=1024))


def test_what_is_refused_because_of_the_thread_is_not_stored() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint([{"id": "a"}])
        with pytest.raises(VersionConflict):
            await one.append(["b"], expected=5)
        with pytest.raises(AlreadyExists):
            await one.append([{"id": "a"}])
        ok, late = await asyncio.gather(
            one.append([{"id": "b"}], expected=1), one.append([{"id": "c"}], expected=1), return_exceptions=True
        )
        assert isinstance(ok, Receipt)
        assert isinstance(late, VersionConflict)
        assert await world.messages() == [{"id": "a"}, {"id": "b"}]

    test(main)


# --- others write too -------------------------------------------------------------------------------------------


def test_two_processes_take_turns_on_one_thread() -> None:
    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        await one.checkpoint(["start"])
        await asyncio.gather(*(i.append([f"{n}.{k}"]) for n in range(30) for k, i in enumerate((one, two))))
        found = await world.messages()
        assert sorted(found[1:]) == sorted(f"{n}.{k}" for n in range(30) for k in range(2))
        for k in range(2):
            own = [m for m in found[1:] if m.endswith(f".{k}")]
            assert own == [f"{n}.{k}" for n in range(30)], "each process' own order"

    test(main)


def test_nothing_is_refused_because_of_what_was_remembered_and_is_no_more() -> None:
    """A caller who loads the thread and decides again would be refused for ever, if refusals looked at memory only."""

    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        await one.checkpoint([{"id": "a"}, {"id": "b"}])
        await two.checkpoint([{"id": "a"}])
        await one.append([{"id": "c"}], expected=1, key="k")
        assert await world.messages() == [{"id": "a"}, {"id": "c"}]
        await two.checkpoint([])
        await one.append([{"id": "c"}])
        with pytest.raises(VersionConflict) as stale:
            await two.append([1], expected=0)
        assert stale.value.actual == 1
        await _break(world, two)
        one.appender.forget("t")
        for instance in (one, two):
            with pytest.raises(ThreadQuarantined):
                await instance.append(["x"])
        await two.checkpoint(["healed"])
        await one.append(["y"])
        assert await world.messages() == ["healed", "y"]

    test(main)


def test_entries_of_others_are_followed_without_asking_postgres() -> None:
    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        await one.checkpoint(["a"])
        world.store_is_up = False
        await two.checkpoint(["a", "b"])
        receipt = await one.append(["c"])
        assert receipt.version == 3
        assert await world.messages() == ["a", "b", "c"]

    test(main)


def test_another_writers_undecodable_payload_does_not_stop_this_one() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        world.log.store([Outgoing(SUBJECTS.of("t"), b"junk", "junk")])
        receipt = await one.checkpoint(["a", "b"])
        await world.flush()
        assert receipt.version == 2
        assert await world.messages() == ["a", "b"]
        assert (await world.ledger.watermark("t")).broken_since is None

    test(main)


# --- retention --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["checkpoint", "append", "keyed"])
@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
def test_a_thread_whose_entries_were_purged_can_be_written(how: str, cold: bool) -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.flush_and_purge()
        writer = Instance(world) if cold else one
        if how == "append":
            await writer.append(["b"])
        else:
            await writer.checkpoint(["a", "b"], key="k" if how == "keyed" else None)
        await writer.append(["c"])
        await world.flush()
        assert await world.messages() == ["a", "b", "c"]
        assert world.ledger.parked.entries == {}

    test(main)


def test_an_answer_that_reached_a_stopped_process_late_tells_of_the_log_as_it_was_then() -> None:
    """Regression: the answer counted as the log's present end, and entries from meanwhile superseded the next write."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"], "another")
        other, send = Instance(world), world.log.publish

        async def answered_late(message: Outgoing, timeout_s: float) -> int:
            seq = await send(message, timeout_s)
            world.log.publish = send  # type: ignore[method-assign]
            await other.checkpoint(["first"])
            await world.flush("another")
            await world.flush_and_purge()
            await asyncio.sleep(2 * world.config.log.failover_window_s)
            return seq

        world.log.publish = answered_late  # type: ignore[method-assign]
        with pytest.raises(OutcomeUnknown):
            await one.append(["b"], "another")
        await asyncio.sleep(2 * world.config.log.failover_window_s)
        await one.checkpoint(["second"])
        await world.flush()
        assert await world.messages() == ["second"]

    test(main)


def test_a_large_entry_that_was_purged_since_it_was_seen_puts_no_thread_into_quarantine() -> None:
    """Regression: the entry's group was in memory and its parts were gone, so the entry counted as damaged."""

    async def main(world: World, one: Instance) -> None:
        two, big = Instance(world), "x" * 10_000
        await one.checkpoint([big])
        assert (await two.reads.joined("t"))[1] == world.log.last_seq
        world.log.opened.remove(two.log)  # the process was stopped meanwhile, and heard nothing
        await world.flush_and_purge()
        await two.append(["b"])
        await world.flush()
        assert await world.messages() == [big, "b"]
        assert world.ledger.parked.entries == {}

    test(main, server=GroupServer(message_bytes_max=4096))


def test_a_part_that_a_deposed_leader_lacks_does_not_make_an_entry_damaged() -> None:
    """A deposed leader was asked for a part of a large entry, and then its successor whether the group is there."""

    async def main(world: World, one: Instance) -> None:
        big, asked, identity = "x" * 10_000, list[int](), world.log.identity

        async def once(seq: int) -> StoredMessage | None:
            asked.append(seq)
            return None if len(asked) == 1 else await identity(seq)

        await one.checkpoint([big])
        world.log.identity = once  # type: ignore[method-assign]
        two = Instance(world)
        (message,) = await two.log.after(world.log.messages[0].subject, 0)
        assert message == world.log.messages[0]
        assert len(asked) > 1

    test(main, server=GroupServer(message_bytes_max=4096))


def test_copies_that_come_after_a_purge_are_refused() -> None:
    """A unit that expects nothing of its thread still expects one group before its own, and a later group is there."""

    async def main(world: World, one: Instance) -> None:
        sent: list[Sequence[Outgoing]] = []
        store = world.log.store

        def remember(messages: Sequence[Outgoing]) -> int:
            sent.append(messages)
            return store(messages)

        world.log.store = remember
        await asyncio.gather(one.checkpoint(["a"]), one.checkpoint(["b"]), one.append(["c"]))
        await one.checkpoint(["newest"])
        world.log.store = store
        await world.flush_and_purge()
        assert sent
        for messages in sent:
            with pytest.raises(Conflict):
                store(messages)
        await world.flush()
        assert await world.messages() == ["newest"]
        assert world.ledger.parked.entries == {}

    test(main)


def test_a_thread_that_was_in_the_store_before_the_buffer_can_be_appended_to() -> None:
    async def main(world: World, one: Instance) -> None:
        await world.store.checkpoint("t", ["old"], Run(run_id="before", thread_id="t"))
        await one.append(["new"])
        await world.flush()
        assert world.ledger.parked.entries == {}
        assert await world.messages() == ["old", "new"]

    test(main)


# --- quarantine -------------------------------------------------------------------------------------------------


async def _break(world: World, one: Instance) -> None:
    await one.checkpoint(["a"])
    receipt = await one.append(["poison"])
    await world.flush(poison=frozenset({receipt.id}))
    one.appender.forget("t")
    assert (await world.ledger.watermark("t")).broken_since is not None


@pytest.mark.parametrize("purged", [False, True], ids=["", "purged"])
def test_a_broken_thread_refuses_appends_until_a_full_checkpoint_heals_it(purged: bool) -> None:
    async def main(world: World, one: Instance) -> None:
        await _break(world, one)
        if purged:
            await world.flush_and_purge()
        with pytest.raises(ThreadQuarantined):
            await one.append(["b"])
        await one.checkpoint(["a", "b"])
        await world.flush()
        watermark = await world.ledger.watermark("t")
        assert watermark.broken_since is None, "a full checkpoint heals"
        assert await world.messages() == ["a", "b"]
        await one.append(["c"])
        await world.flush()
        assert await world.messages() == ["a", "b", "c"]

    test(main)


def test_a_busy_thread_is_healed_too() -> None:
    """`forget` comes while a write is on its way, and that write still remembers the broken chain."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        poison = await one.append(["poison"])
        on_its_way = asyncio.ensure_future(one.checkpoint(["a", "poison", "b"]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await world.flush(poison=frozenset({poison.id}))
        one.appender.forget("t")
        await on_its_way
        await one.checkpoint(["a", "poison", "b", "c"])
        await world.flush()
        assert (await world.ledger.watermark("t")).broken_since is None
        assert await world.messages() == ["a", "poison", "b", "c"]

    test(main)


def test_what_is_told_during_a_look_up_counts() -> None:
    """Postgres answered before the thread was broken."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        poison = await one.append(["poison"])
        two = Instance(world)
        watermarks = world.ledger.watermarks

        async def told(thread_ids: Sequence[str]) -> dict[str, tuple[Watermark, int]]:
            found = await watermarks(thread_ids)
            world.ledger.watermarks = watermarks  # type: ignore[method-assign]
            await world.flush(poison=frozenset({poison.id}))
            two.appender.forget("t")
            return found

        world.ledger.watermarks = told  # type: ignore[method-assign]
        with pytest.raises(ThreadQuarantined):
            await two.append(["b"])

    test(main)


def test_what_is_told_while_a_refusal_is_confirmed_counts() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        poison = await one.append(["poison"])
        last = one.log.last

        async def told(subjects: Sequence[str]) -> dict[str, StoredMessage]:
            found = await last(subjects)
            one.log.last = last  # type: ignore[method-assign]
            await world.flush(poison=frozenset({poison.id}))
            one.appender.forget("t")
            return found

        one.log.last = told  # type: ignore[method-assign]
        for expected in (9, None):
            with pytest.raises(ThreadQuarantined):
                await one.append(["b"], expected=expected)

    test(main)


# --- idempotency ------------------------------------------------------------------------------------------------


def test_a_repeated_key_stores_nothing_and_says_so() -> None:
    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        first = await one.checkpoint(["a"], key="k")
        for writer in (one, two, one):
            again = await writer.checkpoint(["a"], key="k")
            assert again.repeated
            assert again.version == first.version
        with pytest.raises(IdempotencyConflict):
            await two.checkpoint(["b"], key="k")
        assert len(world.log.messages) == 1

    test(main)


def test_one_key_given_by_many_callers_at_once_is_stored_once() -> None:
    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        receipts = await asyncio.gather(
            *(i.checkpoint(["a"], key="k", run_id="r") for _ in range(10) for i in (one, two))
        )
        assert sum(not r.repeated for r in receipts) == 1
        assert world.runs() == {"r": 1}

    test(main)


def test_a_key_is_known_after_a_flush_and_a_purge() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"], key="k")
        await world.flush_and_purge()
        two = Instance(world)
        receipt = await two.checkpoint(["a"], key="k")
        assert receipt.repeated
        watermark = await world.ledger.watermark("t")
        assert receipt.thread_seq <= watermark.flushed_seq, "a read that takes this receipt must be able to reach it"

    test(main)


@pytest.mark.parametrize("together", [False, True])
def test_a_key_is_known_behind_an_entry_that_was_written_without_asking_postgres(together: bool) -> None:
    async def main(world: World, one: Instance) -> None:
        await one.append(["a"], key="k", run_id="keyed")
        await world.flush_and_purge()
        two = Instance(world)
        if together:
            _, receipt = await asyncio.gather(two.checkpoint(["a", "b"]), two.append(["a"], key="k", run_id="keyed"))
        else:
            await two.checkpoint(["a", "b"])
            receipt = await two.append(["a"], key="k", run_id="keyed")
        assert receipt.repeated, "the row's ring knows the key, the entry's ring does not"
        assert world.runs()["keyed"] == 0

    test(main)


def test_a_keyed_write_to_a_thread_only_postgres_can_judge_waits_for_nobody_when_it_is_down() -> None:
    async def main(world: World, one: Instance) -> None:
        world.store_is_up = False
        with pytest.raises(StoreUnavailable):
            await one.checkpoint(["a"], key="k")
        await one.checkpoint(["a"])
        assert await world.messages() == ["a"]

    test(main)


def test_what_the_log_alone_tells_of_keys_is_not_taken_for_all_of_them() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"], key="k", run_id="keyed")
        await world.flush_and_purge()
        world.store_is_up = False
        await Instance(world).checkpoint(["a", "b"])  # the instance is cold, and from here on the log knows the content
        other = Instance(world)
        await other.append(["c"])
        with pytest.raises(StoreUnavailable):
            await other.append(["a"], key="k", run_id="keyed")
        world.store_is_up = True
        assert (await other.append(["a"], key="k", run_id="keyed")).repeated
        assert world.runs()["keyed"] == 0

    test(main)


def test_while_postgres_is_down_an_append_that_needs_it_does_not_hold_up_a_checkpoint() -> None:
    async def main(world: World, one: Instance) -> None:
        world.store_is_up = False
        found = await asyncio.gather(one.append(["b"]), one.checkpoint(["a"]), return_exceptions=True)
        assert isinstance(found[0], StoreUnavailable)
        assert isinstance(found[1], Receipt)

    test(main)


def test_the_last_entries_of_idle_threads_cost_their_groups_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each of these entries brought the thirty groups before it along."""
    monkeypatch.setattr(tail, "_KEPT_BYTES", 0)

    async def main(world: World, one: Instance) -> None:
        for n in range(100):
            await one.checkpoint([n], f"t{n}")
        other, part, shown = Instance(world), world.log.part, 0

        async def counted(*asked: Any) -> Part:
            nonlocal shown
            found = await part(*asked)
            shown += len(found.messages)
            return found

        subjects = [SUBJECTS.of(f"t{n}") for n in range(0, 90, 3)]
        assert await other.log.last([SUBJECTS.of("nobody")]) == {}
        world.log.part = counted  # type: ignore[method-assign]
        found = await other.log.last(subjects)
        assert sorted(found) == sorted(subjects)
        assert all(message.subject == subject for subject, message in found.items())
        assert shown == len(subjects)

    test(main)


# --- what fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["unavailable", "lost", "stored", "late", "slow", "intruder"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("large", [False, True], ids=["", "large"])
def test_one_fault_is_overcome(fault: str, warm: bool, large: bool) -> None:
    async def main(world: World, one: Instance) -> None:
        if warm:
            await one.checkpoint(["start"])
        faults(world.log, fault)
        messages = ["start", "x" * 9000] if large else ["start", "x"]
        receipt = await one.checkpoint(messages, run_id="mine")
        assert world.runs()["mine"] == 1
        assert receipt.thread_seq == world.log.last_of(SUBJECTS.of("t"))
        assert await world.messages() == messages
        await one.append(["next"])
        assert await world.messages() == [*messages, "next"]

    test(main, server=GroupServer(message_bytes_max=4096))


def test_a_refusal_does_not_rest_on_what_a_conflict_showed_before_the_call() -> None:
    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        await one.checkpoint(["a"])
        one.log._tail.last_seen._deaf_until = float("inf")  # it hears nothing of the other, and sees only what it reads
        catch_up, calls = one.appender._finder.catch_up, []

        async def overtaken_again(*asked: Any) -> Any:
            one.appender._finder.catch_up = catch_up  # type: ignore[method-assign]
            await two.append(["c"])
            calls.append(asyncio.ensure_future(one.append(["d"], expected=3)))
            await asyncio.sleep(0)
            return await catch_up(*asked)

        one.appender._finder.catch_up = overtaken_again  # type: ignore[method-assign]
        await two.append(["b"])
        with pytest.raises(VersionConflict, match="version 3, expected 1"):
            await one.append(["x"], expected=1)
        assert (await calls[0]).version == 4
        assert await world.messages() == ["a", "b", "c", "d"]

    test(main)


def test_ones_own_success_is_not_taken_for_a_conflict() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        faults(world.log, "late", "late")
        await one.append(["b"], run_id="mine")
        assert world.runs()["mine"] == 1
        assert await world.messages() == ["a", "b"]

    test(main)


def test_behind_others_entries_whose_first_is_purged_a_lost_answer_is_a_conflict() -> None:
    """The groups no longer tell what became of the unit; the thread does."""

    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        await one.checkpoint(["m0"])
        send = world.log._send

        async def lost(kind: str, messages: Sequence[Outgoing]) -> int:
            world.log._send = send
            for text in ("theirs", "theirs too"):
                await two.append([text])
            await world.flush()
            world.log.expire_below(world.log.last_seq)
            raise AppendUnknown("no answer")

        world.log._send = lost
        assert not (await one.append(["mine"])).repeated
        await world.flush()
        assert await world.messages() == ["m0", "theirs", "theirs too", "mine"]

    test(main)


def test_a_full_log_rejects_and_goes_on_once_there_is_room() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        faults(world.log, "full")
        with pytest.raises(LogFull):
            await one.append(["b"])
        await one.append(["c"])
        assert await world.messages() == ["a", "c"]

    test(main)


@pytest.mark.parametrize("fault", ["unavailable", "lost", "stored", "late"])
def test_a_log_that_stays_away_ends_every_call_in_time(fault: str) -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        away = True
        world.log.fault = lambda kind: (fault if kind != "read" else "unavailable") if away else ""
        began = asyncio.get_running_loop().time()
        found = await asyncio.gather(
            *(one.append([f"m{n}"], run_id=f"r{n}") for n in range(5)),
            *(one.checkpoint([n], f"other {n}") for n in range(5)),
            return_exceptions=True,
        )
        assert asyncio.get_running_loop().time() - began < 12
        assert all(isinstance(f, (OutcomeUnknown, LogUnavailable)) for f in found), found
        away = False
        await asyncio.sleep(5)
        receipt = await one.append(["afterwards"])
        stored = world.runs()
        for n, outcome in enumerate(found[:5]):
            assert stored[f"r{n}"] <= (1 if isinstance(outcome, OutcomeUnknown) else 0)
        assert receipt.thread_seq == world.log.last_of(SUBJECTS.of("t"))

    test(main)


@pytest.mark.parametrize("fault", ["unavailable", "lost"])
def test_a_log_that_stays_away_ends_every_call_though_the_loop_stands_still_again_and_again(fault: str) -> None:
    """Regression: each time gave each write more time, so an app that computes on its loop waited for ever."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        world.log.fault = lambda kind: fault if kind != "read" else "unavailable"
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        began = loop.time()
        calls = [asyncio.create_task(call) for call in (one.append(["b"]), one.checkpoint(["c"], "other"))]
        while not all(call.done() for call in calls) and loop.time() < began + 100:
            loop.jumping.now += 3.0
            await asyncio.sleep(0.01)
        # While half of the time is lost, 10 s more are given in 20 s.
        assert loop.time() - began < world.config.append_timeout_s + 20 + 2 * 3
        for call in calls:
            with pytest.raises((OutcomeUnknown, LogUnavailable)):
                await call

    test(main)


def test_a_write_while_nothing_is_connected_fails_in_time_and_the_next_goes_on() -> None:
    """Before a send the connection is asked for its limits, and there is none."""

    class Disconnected(GroupServer):
        away = False

        @property
        def message_bytes_max(self) -> int:
            if self.away:
                raise LogUnavailable("not connected")
            return 1 << 20

        @message_bytes_max.setter
        def message_bytes_max(self, _: int) -> None: ...

    log = Disconnected()

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        log.away, log.fault = True, lambda kind: "unavailable"
        began = asyncio.get_running_loop().time()
        found = await asyncio.gather(*(one.append([n]) for n in range(3)), return_exceptions=True)
        assert all(isinstance(f, LogUnavailable) for f in found)
        assert asyncio.get_running_loop().time() <= began + world.config.append_timeout_s
        log.away, log.fault = False, lambda kind: ""
        await one.append(["b"])
        assert await world.messages() == ["a", "b"]

    test(main, server=log)


def test_what_was_never_sent_ends_with_nothing_stored_and_nothing_is() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"], "first")
        world.log.fault = lambda kind: "lost" if kind != "read" else "unavailable"
        first = asyncio.create_task(one.append(["b"], "first"))
        await asyncio.sleep(0.1)  # its group has no answer, and everything else waits for that answer
        found = await asyncio.gather(*(one.append([n], f"other {n}") for n in range(3)), return_exceptions=True)
        assert all(isinstance(f, LogUnavailable) and "nothing was stored" in str(f) for f in found), found
        with pytest.raises(OutcomeUnknown):
            await first
        world.log.fault = lambda kind: ""
        await asyncio.sleep(5)
        for n in range(3):
            assert not world.log.last_of(SUBJECTS.of(f"other {n}"))
            await one.append(["afterwards"], f"other {n}")

    test(main)


async def token_of_unknown(world: World, one: Instance, fault: str) -> str:
    """The token of an append of "b" whose outcome nobody learns."""
    world.log.fault = lambda kind: fault if kind != "read" else "unavailable"
    with pytest.raises(OutcomeUnknown) as unknown:
        await one.append(["b"], run_id="r")
    world.log.fault = lambda kind: ""
    return unknown.value.token


@pytest.mark.parametrize("fault", ["stored", "lost"])
def test_the_token_of_an_unknown_outcome_makes_a_retry_safe(fault: str) -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        token = await token_of_unknown(world, one, fault)
        two = Instance(world)
        receipt = await two.append(["b"], key=token, run_id="r")
        assert receipt.repeated is (fault == "stored")
        assert world.runs()["r"] == 1
        assert await world.messages() == ["a", "b"]

    test(main)


def test_a_key_whose_entry_was_stored_is_refused_with_other_content() -> None:
    """Also when the thread's ring has lost the key, so that the entry itself tells what was written under it."""

    async def main(world: World, one: Instance) -> None:
        await one.append(["a"], key="first")  # from here on it knows the thread's keys
        world.log.fault = lambda kind: "stored" if kind != "read" else "unavailable"
        with pytest.raises(OutcomeUnknown):
            await one.append(["b"], key="k", run_id="r")
        world.log.fault = lambda kind: ""
        other = Instance(world)
        for n in range(40):
            await other.append([n])
        with pytest.raises(IdempotencyConflict):
            await one.append(["c"], key="k", run_id="r")
        assert (await one.append(["b"], key="k", run_id="r")).repeated
        assert await world.messages() == ["a", "b", *range(40)]

    test(main)


@pytest.mark.parametrize("fault", ["stored", "lost", "late"])
def test_a_token_is_good_for_as_long_as_the_log_holds_the_entry_however_much_others_write(fault: str) -> None:
    """A thread's ring knows its last 16 keys, but the process that sent the write knows where to look."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        world.log.fault = lambda kind: fault if kind != "read" else "unavailable"
        with pytest.raises(OutcomeUnknown) as unknown:
            await one.append(["b"], run_id="r")
        token = unknown.value.token
        world.log.fault = lambda kind: ""
        for _ in range(8):  # let everything that is under way arrive
            await world.log.end(1)
        other = Instance(world)
        for n in range(40):
            await other.append([n])
        world.log.fault = lambda kind: "unavailable"
        with pytest.raises(OutcomeUnknown):  # the log is still away
            await one.append(["b"], key=token, run_id="r")
        world.log.fault = lambda kind: ""
        receipt = await one.append(["b"], key=token, run_id="r")
        assert receipt.repeated is (fault != "lost")
        again = await one.append(["b"], key=token, run_id="r")
        if fault == "lost":
            assert (again.id, again.repeated) == (receipt.id, True)
        messages = await world.messages()
        assert messages is not None
        assert messages.count("b") == 1
        assert sorted(map(str, messages)) == sorted(["a", "b", *map(str, range(40))])

    test(main)


@pytest.mark.parametrize("fault", ["stored", "lost"])
def test_a_token_is_good_also_when_all_of_the_thread_is_flushed_and_the_log_shows_none_of_it(fault: str) -> None:
    """The log holds such entries for another day, but nobody reads there what every copy of Postgres has."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        token = await token_of_unknown(world, one, fault)
        for _ in range(8):  # let everything that is under way arrive
            await world.log.end(1)
        other = Instance(world)
        for n in range(40):
            await other.append([n])
        await asyncio.sleep(5)
        await world.flush()
        for _ in range(3):
            world.log.intrude(SUBJECTS.of("elsewhere"))
            for partition in range(SUBJECTS.partitions):
                world.log.bucket.put("floor", partition, Floor(world.log.last_seq, 0))
            for log in world.log.opened:
                await log.let_go({})
        assert await one.log.ends([SUBJECTS.of("t")]) == [0]
        assert len(world.tail("t")) > 40
        receipt = await one.append(["b"], key=token, run_id="r")
        assert receipt.repeated is (fault != "lost")
        messages = await world.messages()
        assert sorted(map(str, messages)) == sorted(["a", "b", *map(str, range(40))])

    test(main)


def test_a_retry_with_a_token_waits_for_a_log_that_is_away() -> None:
    """Otherwise a caller who retries until the outcome is known would be in a busy loop."""

    async def main(world: World, one: Instance) -> None:
        loop = asyncio.get_running_loop()
        await one.checkpoint(["a"])
        world.log.fault = lambda kind: "lost" if kind != "read" else "unavailable"
        with pytest.raises(OutcomeUnknown) as unknown:
            await one.append(["b"], run_id="r")
        token, began = unknown.value.token, loop.time()
        with pytest.raises(OutcomeUnknown) as again:
            await one.append(["b"], run_id="r", key=token)
        assert again.value.token == token
        assert world.config.append_timeout_s - 0.5 < loop.time() - began < world.config.append_timeout_s + 0.5
        loop.call_later(2, lambda: setattr(world.log, "fault", lambda kind: ""))
        await one.append(["b"], run_id="r", key=token)
        assert await world.messages() == ["a", "b"]
        assert world.runs()["r"] == 1

    test(main)


def test_a_whole_list_that_may_be_in_quarantine_stays_unknown_and_another_one_heals_its_thread() -> None:
    """Its thread was in quarantine before: nothing tells whether it was parked, or passed over. No wait ends that."""

    async def main(world: World, one: Instance) -> None:
        loop = asyncio.get_running_loop()
        await _break(world, one)
        await world.flush_and_purge()
        sent = False

        def lost(kind: str) -> str:
            nonlocal sent
            sent = sent or kind != "read"
            return "stored" if kind != "read" else "unavailable" if sent else ""

        world.log.fault = lost
        with pytest.raises(OutcomeUnknown) as unknown:
            await one.checkpoint(["a", "b"], run_id="r")
        world.log.fault = lambda kind: ""
        (entry,) = world.tail("t")
        assert isinstance(entry, StoredEntry)
        await world.flush(poison=frozenset({entry.entry.id}))
        one.appender.forget("t")
        assert entry.seq in world.ledger.parked.entries
        for _ in range(2):
            began = loop.time()
            with pytest.raises(OutcomeUnknown) as again:
                await one.checkpoint(["a", "b"], run_id="r", key=unknown.value.token)
            assert loop.time() - began < 1
            assert "quarantine" in str(again.value.__cause__)
        await one.checkpoint(["a", "b", "c"])
        await world.flush()
        assert await world.messages() == ["a", "b", "c"]
        with pytest.raises(OutcomeUnknown):
            await one.checkpoint(["a", "b"], run_id="r", key=unknown.value.token)
        assert await world.messages() == ["a", "b", "c"], "a retry is safe"

    test(main)


def test_an_error_nobody_thought_of_leaves_no_lane_stuck() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        broken = True

        def fault(kind: str) -> str:
            if broken and kind == "read":
                raise ValueError("an answer that makes no sense")
            return "lost" if broken else ""

        world.log.fault = fault
        with pytest.raises((OutcomeUnknown, LogUnavailable)):
            await one.append(["b"])
        broken = False
        await asyncio.sleep(5)
        await one.append(["c"])

    test(main)


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("fault", ["", "stored", "lost", "unavailable", "intruder"])
def test_a_caller_that_gives_up_at_any_moment_leaves_the_lane_in_order(turns: int, fault: str) -> None:
    async def main(world: World, one: Instance) -> None:
        if turns % 2:
            await one.checkpoint(["a"], run_id="first")
        faults(world.log, fault)
        tasks = [asyncio.ensure_future(one.append([f"m{n}"], run_id=f"r{n}")) for n in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[0].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[0], (asyncio.CancelledError, Receipt))
        assert all(isinstance(f, Receipt) for f in found[1:]), found
        await one.append(["last"])
        shown = [m for m in await world.messages() if not str(m).startswith("intruder")]
        assert shown[-3:] == ["m1", "m2", "last"]
        assert world.runs()["r0"] <= 1

    test(main)


# --- closing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", "slow", "unavailable", "lost", "stored"])
@pytest.mark.parametrize("turns", [0, 3, *seldom(1, 6)])
def test_closing_with_writes_in_flight_ends_them_all(fault: str, turns: int) -> None:
    async def main() -> None:
        world = World()
        one = Instance(world)
        await one.checkpoint(["a"])
        world.log.fault = lambda kind: fault if kind != "read" else ("unavailable" if fault == "unavailable" else "")
        tasks = [asyncio.ensure_future(one.append([n], run_id=f"r{n}")) for n in range(5)]
        tasks += [asyncio.ensure_future(one.checkpoint([n], f"other {n}")) for n in range(5)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await one.aclose()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        if turns and not fault:  # what is on its way when a store is closed is finished
            assert all(isinstance(outcome, Receipt) for outcome in found), found
        for n, outcome in enumerate(found[:5]):
            if isinstance(outcome, Receipt):
                assert world.runs()[f"r{n}"] == 1
            elif isinstance(outcome, OutcomeUnknown):
                assert world.runs()[f"r{n}"] <= 1
            else:
                assert isinstance(outcome, Unavailable), outcome
                assert world.runs()[f"r{n}"] == 0
        with pytest.raises(Closed):
            await one.checkpoint(["late"])
        await one.aclose()

    run(main())


# --- bounds -----------------------------------------------------------------------------------------------------


def test_what_is_remembered_of_threads_is_bounded_by_their_messages_too() -> None:
    async def main(world: World, one: Instance) -> None:
        for n in range(20):
            for _ in range(3):
                await one.append([f"m{i}" for i in range(100)], f"t{n}")
        remembered = [one.appender.tip(f"t{n}") for n in range(20)]
        held = sum(tip.memory.weight for tip in remembered if tip is not None and tip.memory is not None)
        assert held <= 64 * 20, "64 messages for each of cached_threads"

    test(main, cached_threads=20)


def test_a_thread_that_is_written_often_pushes_out_no_other() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"], "other")
        for _ in range(64 * 2 + 1):  # the weight of two threads, if each write of the same one counted
            await one.checkpoint(["a"])
        assert one.appender.tip("other") is not None

    test(main, cached_threads=2)


def test_no_more_threads_are_remembered_than_was_said_and_those_are_the_last_ones() -> None:
    async def main(world: World, one: Instance) -> None:
        for thread_id in ("a", "b", "c", "d", "b", "e"):
            await one.checkpoint(["m"], thread_id)
        assert [t for t in "abcde" if one.appender.tip(t) is not None] == ["b", "d", "e"]

    test(main, cached_threads=3)


# --- everything at once -----------------------------------------------------------------------------------------


@examples(120)
@given(
    seed=st.integers(0, 2**32),
    share=st.floats(0, 0.6),
    kinds=st.sets(st.sampled_from(WRITE_FAULTS[1:]), max_size=4),
    gives_up=st.booleans(),
)
@example(seed=1597, share=0.375, kinds={"slow", "stored", "intruder"}, gives_up=True)
def test_whatever_fails_each_call_ends_as_it_says(seed: int, share: float, kinds: set[str], gives_up: bool) -> None:
    chance = random.Random(seed)

    async def main() -> None:
        world = World()
        writers = [Instance(world), Instance(world)]
        log = world.log

        def fault(kind: str) -> str:
            if not kinds or chance.random() >= share:
                return ""
            return chance.choice(sorted(kinds)) if kind != "read" else chance.choice(["", "", "unavailable"])

        log.fault = fault
        calls: list[tuple[int, str, str, asyncio.Future[Receipt]]] = []
        for n in range(chance.randint(2, 25)):
            w = chance.randrange(2)
            thread = f"t{chance.randrange(3)}"
            run_id = f"r{n}"
            one = writers[w]
            work: Awaitable[Receipt]
            match chance.randrange(4):
                case 0:
                    work = one.checkpoint([f"m{n}", f"m{n}b"], thread, run_id=run_id)
                case 1:
                    run_id = f"keyed {chance.randrange(3)} of {thread}"
                    work = one.append([run_id], thread, key=run_id, run_id=run_id)
                case _:
                    work = one.append([f"m{n}"], thread, run_id=run_id)
            task = asyncio.ensure_future(work)
            calls.append((w, thread, run_id, task))
            for _ in range(chance.choice([0, 0, 1, 5, 20])):
                await asyncio.sleep(0)
            if gives_up and chance.random() < 0.1:
                chance.choice(calls)[3].cancel()
        found = await asyncio.gather(*(task for *_, task in calls), return_exceptions=True)
        log.fault = lambda kind: ""
        await asyncio.sleep(20)  # units whose callers have gone are sent again

        saved = {thread: world.runs(thread) for thread in ("t0", "t1", "t2")}
        for (_, thread, run_id, _), outcome in zip(calls, found, strict=True):
            times = saved[thread][run_id]
            if isinstance(outcome, Receipt):
                assert times == 1, (run_id, outcome)
                if not outcome.repeated:
                    entries = [i for i in world.tail(thread) if isinstance(i, StoredEntry)]
                    (entry,) = [i for i in entries if i.entry.id == outcome.id]
                    assert entry.seq == outcome.thread_seq
                    assert entry.entry.version == outcome.version
            elif isinstance(outcome, (Rejected, Unavailable)):
                # Another call with the same key may have been stored.
                assert times == 0 or run_id.startswith("keyed"), (run_id, outcome)
            else:
                assert isinstance(outcome, (OutcomeUnknown, asyncio.CancelledError)), outcome
                assert times <= 1, (run_id, outcome)
        for w in range(2):
            for thread in saved:
                in_order = [
                    r.thread_seq
                    for (by, of, _, _), r in zip(calls, found, strict=True)
                    if by == w and of == thread and isinstance(r, Receipt) and not r.repeated
                ]
                assert in_order == sorted(in_order), "the order of the calls of one process"
        for thread in saved:
            receipt = await asyncio.gather(*(one.append(["end"], thread) for one in writers))
            assert max(r.thread_seq for r in receipt) == log.last_of(SUBJECTS.of(thread))
            assert (await world.shown(thread)).watermark.broken_since is None, "every chain is whole"
            await world.flush(thread)
        assert world.ledger.parked.entries == {}
        for one in writers:
            await one.aclose()

    run(main())


def test_errors_of_the_write_path_are_bufstores_own() -> None:
    async def main(world: World, one: Instance) -> None:
        world.log.fault = lambda kind: chance.choice(WRITE_FAULTS)
        chance = random.Random(5)
        found = await asyncio.gather(*(one.append([n], f"t{n % 4}") for n in range(60)), return_exceptions=True)
        world.log.fault = lambda kind: ""
        assert all(isinstance(f, (Receipt, BufstoreError)) for f in found), found

    test(main)


def settled(world: World) -> None:
    """Raise the floors to the log's end, as a failover window after a flush: nothing there has to be shown any more."""
    world.log.intrude(SUBJECTS.of("elsewhere"))
    for partition in range(SUBJECTS.partitions):
        world.log.bucket.put("floor", partition, Floor(world.log.last_seq, 0))


@pytest.mark.parametrize("others", [0, 3, 15, 16, 20])
@pytest.mark.parametrize("whole", [False, True])
def test_a_retry_is_exact_when_others_began_anew_behind_what_the_log_shows_no_more(others: int, whole: bool) -> None:
    """Regression: the others' first entry, which expects nothing, hid entries before it that the log still held."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        world.log.fault = lambda kind: "stored" if kind != "read" else "unavailable"
        with pytest.raises(OutcomeUnknown) as unknown:
            await one.append(["b"], run_id="r")
        world.log.fault = lambda _: ""
        await asyncio.sleep(70)
        await world.flush()
        for _ in range(3):
            settled(world)
            for log in world.log.opened:
                await log.let_go({})
        two = Instance(world)
        for n in range(others):
            await (two.checkpoint(["a", "b", *range(n + 1)]) if whole else two.append([n]))
        await one.append(["z"])
        assert (await one.append(["b"], key=unknown.value.token, run_id="r")).repeated
        await world.flush()
        assert await world.messages() == ["a", "b", *range(others), "z"]

    test(main)


@pytest.mark.parametrize("conflict", [False, True])
def test_that_an_entry_was_parked_is_heard_while_a_write_is_on_its_way(conflict: bool) -> None:
    """Regression: the write met a conflict, and went on from the state that it had been told to forget."""

    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        await one.checkpoint(["a"])
        await world.flush()
        poison = frozenset([(await one.append(["poison"])).id])
        send = world.log._send

        async def sending(kind: str, messages: Any) -> int:
            world.log._send = send  # type: ignore[method-assign]
            if conflict:
                await two.append(["theirs"])
            await world.flush(poison=poison)
            one.appender.forget("t")
            return await send(kind, messages)

        world.log._send = sending  # type: ignore[method-assign]
        await asyncio.gather(one.append(["on its way"]), return_exceptions=True)
        for n in range(2):
            with pytest.raises(ThreadQuarantined):
                await one.append([n])

    test(main)


def test_who_is_overtaken_by_a_kind_of_a_later_release_writes_on() -> None:
    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        await one.checkpoint(["a"])
        send = world.log._send

        async def sending(kind: str, messages: Any) -> int:
            world.log._send = send  # type: ignore[method-assign]
            await two.appender.append(
                "t", lambda tip: Draft(b"\xc1 of a later release", False, tip.version, tip.memory, lambda: None)
            )
            return await send(kind, messages)

        world.log._send = sending  # type: ignore[method-assign]
        await asyncio.gather(one.checkpoint(["a", "b"]), one.checkpoint(["a", "b", "c"]))

    test(main)


def test_a_thread_of_which_an_entry_cannot_be_built_takes_the_next_write(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        with monkeypatch.context() as patched:
            patched.setattr(next_unit, "header_of", out_of_memory)
            with pytest.raises(LogUnavailable, match="MemoryError"):
                await one.checkpoint(["a", "b"])
        await one.checkpoint(["a", "c"])
        assert await world.messages() == ["a", "c"]

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    test(main)


def test_what_others_wrote_is_not_put_on_a_base_when_some_of_it_is_gone() -> None:
    """Else the next list would be compared with messages that the thread never had, and stored as a part of those."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        two = Instance(world)
        await two.checkpoint(["x"])
        last = await two.append(["c"])
        await world.flush()
        world.log.expire_below(last.thread_seq)
        assert [item.seq for item in world.tail("t")] == [last.thread_seq]
        await one.checkpoint(["a", "c", "d"])
        await world.flush()
        assert await world.messages() == ["a", "c", "d"]
        assert world.ledger.parked.entries == {}

    test(main)
