"""A writer that is alone sends its groups without a task, and they end as those of a task do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from bufstore.buffer.groups import sequencer
from bufstore.buffer.groups.others import _WISHES
from bufstore.buffer.groups.sequencer import Sequencer
from bufstore.buffer.places import place
from bufstore.errors import LogFull, LogUnavailable
from bufstore.jetstream.messages import AppendUnknown, Conflict
from unit.fake_log import run
from unit.test_group_sequencer import Ended, Faulty, Process, World, check, settle, started

_ALONE = sequencer._LONE


async def alone(one: Process) -> int:
    """Write until the writer counts as alone. Returns the place of the last entry, which is of thread "a"."""
    last = 0
    for _ in range(_ALONE + 1):
        unit = one.add("a", last)
        await unit.done.wait()
        last = unit.ends[0]
        assert isinstance(last, int)
    await asyncio.sleep(1)
    return last


def without_a_task(writer: Sequencer) -> bool:
    return writer._posted is not None and writer._task is None


def with_a_lone_writer(
    fate: Callable[[World, Process, int], Any], log: Callable[[World], Faulty] | None = None
) -> None:
    """Run this with a writer that is alone, and the place of its last entry; check all in the end."""

    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world, log=log(world) if log is not None else None)
        await fate(world, one, await alone(one))
        await settle(world, [one])
        await one.sequencer.aclose()
        check(world, [one])
        assert not one.sequencer._sending

    run(main())


def test_a_lone_writers_group_is_sent_before_its_call_returns() -> None:
    async def fate(world: World, one: Process, last: int) -> None:
        for _ in range(3):
            unit = one.add("a", last)
            assert without_a_task(one.sequencer)
            assert one.sequencer.oldest is not None
            await unit.done.wait()
            assert one.sequencer._task is None
            assert one.sequencer.oldest is None
            (end,) = unit.ends
            assert isinstance(end, int) and end > last
            last = end

    with_a_lone_writer(fate)


def test_two_that_write_together_are_parted_once_and_not_again() -> None:
    async def fate(world: World, one: Process, last: int) -> None:
        def groups() -> int:
            return len(world.groups())

        before, expected = groups(), [last, 0]
        for times in range(1, 4):
            units = [one.add(t, at) for t, at in zip("ab", expected, strict=True)]
            for unit in units:
                await unit.done.wait()
            expected = [unit.ends[0] for unit in units]  # type: ignore[misc]
            assert groups() == before + times + 1

    with_a_lone_writer(fate)


def test_what_waits_goes_on_its_way_when_the_answer_comes() -> None:
    async def fate(world: World, one: Process, last: int) -> None:
        units = [one.add(thread, 0) for thread in "bcd"]
        assert without_a_task(one.sequencer)
        for unit in units:
            await asyncio.wait_for(unit.done.wait(), 1)
        assert [len(group.records) for group, _ in world.groups()[-2:]] == [1, 2]

    with_a_lone_writer(fate)


@pytest.mark.parametrize("fault", ["lost", "stored", "unavailable", "doubled", "full"])
def test_an_answer_that_is_lost_or_refuses_is_looked_after_by_a_task(fault: str) -> None:
    async def fate(world: World, one: Process, last: int) -> None:
        world.faults = (fault,)
        unit = one.add("a", last)
        assert without_a_task(one.sequencer)
        await asyncio.sleep(0.01)
        world.faults = ()
        await asyncio.wait_for(unit.done.wait(), 60)
        (end,) = unit.ends
        assert isinstance(end, {"unavailable": LogUnavailable, "full": LogFull}.get(fault, int)), end

    with_a_lone_writer(fate)


def test_another_writer_that_was_first_is_met_as_in_a_task() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        one, two = await started(world, 2)
        last = await alone(one)
        await two.tail.see_all()
        await two.add("a", last).done.wait()
        unit = one.add("a", last)
        assert without_a_task(one.sequencer)
        await unit.done.wait()
        assert isinstance(unit.ends[0], Conflict)
        await two.add("c", 0).done.wait()
        other = one.add("b", 0)
        await other.done.wait()
        assert isinstance(other.ends[0], int)
        await settle(world, [one, two])
        for process in (one, two):
            await process.sequencer.aclose()
        check(world, [one, two])

    run(main())


def test_closing_ends_what_is_on_its_way() -> None:
    async def fate(world: World, one: Process, last: int) -> None:
        world.faults = ("slow",)
        unit, waiting = one.add("a", last), one.add("b", 0)
        await asyncio.sleep(0.01)
        await one.sequencer.aclose()
        assert isinstance(unit.ends[0], AppendUnknown)
        assert len(waiting.ends) == 1

    with_a_lone_writer(fate)


def test_a_connection_that_ended_for_good_begins_no_task() -> None:
    async def fate(world: World, one: Process, last: int) -> None:
        world.faults = ("stored",)
        unit = one.add("a", last)
        assert isinstance(one.log, Ended)
        await asyncio.sleep(0)
        one.log.ended = True
        await asyncio.wait_for(unit.done.wait(), 1)
        assert isinstance(unit.ends[0], AppendUnknown)
        assert one.sequencer._task is None
        one.log.ended = False

    with_a_lone_writer(fate, lambda world: Ended(world, 4096))


def test_who_ends_the_task_that_looks_after_a_lost_answer_ends_the_write() -> None:
    async def fate(world: World, one: Process, last: int) -> None:
        world.faults = ("stored",)
        unit = one.add("a", last)
        for _ in range(20):
            await asyncio.sleep(0)
            if one.sequencer._task is not None:
                one.sequencer._task.cancel()  # before it has begun
                break
        await asyncio.wait_for(unit.done.wait(), 1)
        assert isinstance(unit.ends[0], AppendUnknown)
        world.faults = ()
        later = one.add("b", 0)
        await asyncio.wait_for(later.done.wait(), 5)
        assert isinstance(later.ends[0], int)

    with_a_lone_writer(fate)


def test_what_cannot_be_sent_at_once_is_sent_by_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fate(world: World, one: Process, last: int) -> None:
        monkeypatch.setattr(one.log, "post", lambda *_: None)
        unit = one.add("a", last)
        assert one.sequencer._task is not None
        await unit.done.wait()
        assert isinstance(unit.ends[0], int)

    with_a_lone_writer(fate)


def test_what_has_to_be_confirmed_first_is_sent_by_a_task() -> None:
    async def fate(world: World, one: Process, last: int) -> None:
        one.tail.last_seen.doubt()
        unit = one.add("a", last)
        assert one.sequencer._task is not None
        await unit.done.wait()
        assert isinstance(unit.ends[0], int)

    with_a_lone_writer(fate)


@pytest.mark.parametrize("where", ["took", "written", "_on_stored", "wrote_unheard"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_as_the_answer_is_read_ends_the_write_and_stops_nobody(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: nothing was written any more, whatever the thread, until the store was opened again."""
    raised: list[BaseException] = []
    monkeypatch.setattr(sequencer, "_raise", raised.append)  # else it would come out of the loop

    async def fate(world: World, one: Process, last: int) -> None:
        writer = one.sequencer
        world.faults = ("slow",)
        unit, waiting = one.add("a", last), one.add("b", 0)
        await asyncio.sleep(0.01)
        world.faults = ()
        on: Any = {"_on_stored": writer, "wrote_unheard": writer._others}.get(where, writer._group)
        known = getattr(on, where)

        def fails(*_: Any) -> None:
            setattr(on, where, known)
            raise error

        setattr(on, where, fails)
        for each in (unit, waiting):
            await asyncio.wait_for(each.done.wait(), 5)
        assert isinstance(unit.ends[0], int if where == "wrote_unheard" else AppendUnknown)
        assert isinstance(waiting.ends[0], int)
        await asyncio.sleep(0)
        assert [type(e) for e in raised] == ([error] if error is KeyboardInterrupt else [])

    with_a_lone_writer(fate)


def test_a_task_that_a_signal_kept_from_being_noted_ends_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it took what the next task sent for its own, and acknowledged it with the place of another entry."""
    monkeypatch.setattr(sequencer, "_raise", lambda _: None)
    spawn, spawned = sequencer.spawn, 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal spawned
        spawned += 1
        task = spawn(*arguments, **options)
        if spawned == 1:
            raise KeyboardInterrupt
        return task

    async def fate(world: World, one: Process, last: int) -> None:
        world.faults = ("stored",)
        monkeypatch.setattr(sequencer, "spawn", interrupted)
        units = [one.add("a", last), one.add("b", 0)]
        await asyncio.sleep(0)
        world.faults = ()
        for unit in units:
            await asyncio.wait_for(unit.done.wait(), 5)
        assert spawned > 1

    with_a_lone_writer(fate)


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_in_between_ends_the_write_as_unknown_and_stops_nobody(
    error: type[BaseException], sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fate(world: World, one: Process, last: int) -> None:
        post = one.log.post

        def fails(*arguments: Any) -> Any:
            if sent:
                post(*arguments)
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(one.log, "post", fails)
            unit = one.unit("a", last)
            if error is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    one.sequencer.add(unit)
            else:
                one.sequencer.add(unit)
            assert not unit.ends, "a unit ends later, and not in its caller's turn"
        await asyncio.wait_for(unit.done.wait(), 1)
        assert isinstance(unit.ends[0], AppendUnknown)
        later = one.add("b", 0)
        await asyncio.wait_for(later.done.wait(), 5)
        assert later.ends == [place(len(world.groups()), 0)]

    with_a_lone_writer(fate)


def test_whoever_is_in_the_way_by_the_time_of_the_answer_is_told_of_the_group() -> None:
    async def fate(world: World, one: Process, last: int) -> None:
        world.faults = ("slow",)
        told: list[bytes] = []
        listener = await one.log.listen(one.sequencer._subjects.writers, told.append)
        unit = one.add("a", last)
        assert without_a_task(one.sequencer)
        await asyncio.sleep(0.01)
        world.faults = ()
        await one.sequencer._others.were_first()  # another writer was refused meanwhile
        await unit.done.wait()
        await asyncio.sleep(0.1)
        assert isinstance(unit.ends[0], int)
        assert any(words[0] != _WISHES for words in told), told
        await listener.close()

    with_a_lone_writer(fate)
