"""Entries that wait in the ledger count for readers and writers, also when the log no longer has them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bufstore.buffer.entry import Base, Malformed
from bufstore.buffer.ports.ledger import Decision
from bufstore.buffer.ports.waiting import WaitingEntry
from bufstore.errors import FlushTimeout, ReadNotFresh, ThreadQuarantined
from bufstore.jetstream.messages import StoredMessage
from bufstore.threads.model import Run, decode_message
from bufstore.types import Consistency
from unit.test_appender import Instance, World, test
from unit.write_world import SUBJECTS


async def shown(one: Instance, level: Consistency = Consistency.READ_YOUR_WRITES, at_least: int = 0) -> list[Any]:
    state = await one.reads.thread("t", level, at_least)
    return [decode_message(m) for m in state.messages]


async def behind_what_waits(world: World, one: Instance) -> Instance:
    """A new process, while thread "t" has "a" in its row, "b" waits in the ledger, and the log has nothing."""
    await one.checkpoint(["a"])
    await world.flush_and_purge()
    await one.append(["b"])
    await world.make_wait_and_purge()
    return Instance(world)


@pytest.mark.parametrize("flushed", [True, False], ids=["flushed-before", "new"])
@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no-tail"])
def test_a_read_joins_the_row_what_waits_and_the_tail(flushed: bool, tail: bool) -> None:
    async def main(world: World, one: Instance) -> None:
        written: list[Any] = []

        async def write(message: str) -> None:
            written.append(message)
            await one.append([message])

        if flushed:
            await write("row")
            await world.flush_and_purge()
        await write("waits")
        await write("waits, too")
        await world.make_wait_and_purge()
        if tail:
            await write("tail")
        two = Instance(world)
        assert await shown(two) == written
        if flushed:
            assert await shown(two, Consistency.EVENTUAL) == written[:1]
        await world.flush()
        assert await shown(two) == written
        assert world.ledger.waiting.entries == {}

    test(main)


def test_what_waits_is_joined_with_content_that_came_past_the_buffer() -> None:
    async def main(world: World, one: Instance) -> None:
        await world.store.checkpoint("t", ["before"], Run(run_id="r", thread_id="t"))
        await one.append(["waits"])
        await world.make_wait_and_purge()
        assert await shown(Instance(world)) == ["before", "waits"]
        await Instance(world).append(["tail"])
        await world.flush()
        assert await world.messages() == ["before", "waits", "tail"]
        assert world.ledger.parked.entries == {}

    test(main)


@pytest.mark.parametrize("when", ["first", "of_thread", "second"])
def test_nothing_is_missed_while_it_moves_into_the_row(when: str) -> None:
    async def main(world: World, one: Instance) -> None:
        two = await behind_what_waits(world, one)
        load, of_thread = world.store.load_checkpoint, world.ledger.waiting.of_thread
        looks = 0

        async def loading(thread_id: str) -> Any:
            nonlocal looks
            looks += 1
            if (looks, when) in ((1, "first"), (2, "second")):
                await world.flush()
            return await load(thread_id)

        async def reading(thread_id: str) -> Any:
            found = await of_thread(thread_id)
            world.ledger.waiting.of_thread = of_thread  # type: ignore[method-assign]
            if when == "of_thread":
                await world.flush()
            return found

        world.store.load_checkpoint, world.ledger.waiting.of_thread = loading, reading  # type: ignore[method-assign]
        assert await shown(two) == ["a", "b"]
        assert world.ledger.waiting.entries == {}

    test(main)


def test_a_watermark_misses_nothing_while_it_moves_into_the_row() -> None:
    """The row of before the flush, without what waited, lacks the keys of what the log no longer shows."""

    async def main(world: World, one: Instance) -> None:
        two = await behind_what_waits(world, one)
        expected = await two.reads.watermark("t")
        of_thread = world.ledger.waiting.of_thread

        async def just_flushed(thread_id: str) -> Any:
            world.ledger.waiting.of_thread = of_thread  # type: ignore[method-assign]
            await world.flush()
            return await of_thread(thread_id)

        world.ledger.waiting.of_thread = just_flushed  # type: ignore[method-assign]
        assert await two.reads.watermark("t") == expected
        assert world.ledger.waiting.entries == {}

    test(main)


@pytest.mark.parametrize("how", ["append", "checkpoint", "keyed"])
def test_a_writer_builds_on_what_waits(how: str) -> None:
    async def main(world: World, one: Instance) -> None:
        two = await behind_what_waits(world, one)
        expected = ["a", "b", "c"]
        match how:
            case "append":
                await two.append(["c"], expected=2)
            case "checkpoint":
                await two.checkpoint(expected)
            case "keyed":
                await two.append(["c"], key="k")
        (first, *_) = world.tail("t")
        assert first.entry.base is (Base.UNKNOWN if how == "checkpoint" else Base.STORED)  # type: ignore[union-attr]
        assert await world.messages() == expected
        await world.flush()
        assert world.ledger.parked.entries == {}
        assert await world.messages() == expected

    test(main)


def test_a_repeat_of_what_waits_is_known() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.flush_and_purge()
        first = await one.append(["b"], key="k")
        await world.make_wait_and_purge()
        again = await Instance(world).append(["b"], key="k")
        assert again.repeated
        assert again.thread_seq >= first.thread_seq
        assert await world.messages() == ["a", "b"]

    test(main)


def test_a_thread_that_only_waits_is_not_new() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.make_wait_and_purge()

        async def held(thread_ids: Any) -> Any:
            return ()  # the store itself has nothing of it yet

        two = Instance(world)
        two.appender._finder._held = held
        await two.appender.learn_new(["t"])
        assert two.appender._finder.as_new("t") is None
        await two.append(["b"])
        await world.flush()
        assert await world.messages() == ["a", "b"]
        assert world.ledger.parked.entries == {}

    test(main)


def test_poison_that_waits_breaks_the_chain_for_a_read_too() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.flush_and_purge()
        seq = world.log.last_seq
        malformed = Malformed(SUBJECTS.of("t"), seq, (StoredMessage(SUBJECTS.of("t"), seq, "?", b""),), "no entry", "t")
        await world.ledger.flush([], [], lambda _: Decision(waiting=[WaitingEntry(malformed, 0, "")]))
        with pytest.raises(ThreadQuarantined):
            await shown(Instance(world))

    test(main)


@pytest.mark.parametrize("flushed", [True, False], ids=["flushed-before", "new"])
def test_what_waits_is_not_flushed_and_not_gone(flushed: bool) -> None:
    """A waiting entry counts as unflushed for a read that must reach its position, and for a wait for a flush."""

    async def main(world: World, one: Instance) -> None:
        if flushed:
            await one.append(["a"])
            await world.flush_and_purge()
        receipt = await one.append(["b"])
        await world.make_wait_and_purge()
        two = Instance(world)
        with pytest.raises(ReadNotFresh):
            await shown(two, Consistency.EVENTUAL, receipt.thread_seq)
        asked: list[int] = []

        async def never(thread_id: str, target: int, timeout_s: float) -> None:
            asked.append(target)
            raise FlushTimeout(thread_id, target=target, flushed=0, reason="")

        two.reads._waiter = type("Waiter", (), {"thread": staticmethod(never)})()  # type: ignore[assignment]
        with pytest.raises(ReadNotFresh):
            await shown(two, Consistency.STRONG)
        with pytest.raises(FlushTimeout):
            await two.reads.force_flush("t", 1.0)
        assert asked == [receipt.thread_seq] * 2
        reading = asyncio.create_task(shown(two, Consistency.EVENTUAL, receipt.thread_seq))
        await asyncio.sleep(0.1)
        await world.flush()
        assert (await reading)[-1] == "b"

    test(main)
