"""A series of writes to one thread is stored in order, in few units, up to the first write that fails."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer import producers
from bufstore.buffer.entry import StoredEntry
from bufstore.buffer.places import place
from bufstore.errors import AlreadyExists, Closed, LogFull, LogUnavailable, OutcomeUnknown, Rejected, Unavailable
from bufstore.types import Receipt
from thorough import examples
from unit.fake_log import WRITE_FAULTS, run
from unit.write_world import SUBJECTS, Instance, World, faults, test


def step(name: str, number: int | None = None, **message: Any) -> tuple[list[Any], str, bytes | None]:
    return [{"n": name} | message], name, producers.item("q", number) if number is not None else None


def test_a_series_is_one_unit_behind_what_the_log_shows() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint([])
        before = world.log.calls
        receipts, error = await one.series([step(f"r{n}") for n in range(20)])
        assert error is None
        assert [(r.thread_seq, r.version) for r in receipts] == [(place(2, n), 1 + n) for n in range(20)]
        assert world.log.calls == before + 1
        assert await world.messages() == [{"n": f"r{n}"} for n in range(20)]
        assert await one.series([]) == ([], None)

    test(main)


def test_nothing_stands_behind_a_step_that_is_refused() -> None:
    async def main(world: World, one: Instance) -> None:
        steps = [step("a", id="1"), step("b"), step("c", id="1"), step("d"), step("e")]
        receipts, error = await one.series(steps)
        assert (len(receipts), type(error)) == (2, AlreadyExists)
        assert await world.messages() == [{"n": "a", "id": "1"}, {"n": "b"}]
        # Other writes to the thread go on.
        await one.append(["f"])
        assert [m["n"] for m in (await world.messages())[:2]] == ["a", "b"]

    test(main)


def test_what_a_source_wrote_before_is_told_and_what_is_behind_it_written() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.series([step("a", 1), step("b", 2)])
        receipts, error = await one.series([step("a", 1), step("b", 2), step("c", 3)])
        assert error is None
        assert [r.repeated for r in receipts] == [True, True, False]
        assert [m["n"] for m in await world.messages()] == ["a", "b", "c"]

    test(main)


@pytest.mark.parametrize("fault", ["unavailable", "lost", "stored", "late", "slow", "intruder"])
def test_one_fault_is_overcome_by_a_series(fault: str) -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint([])
        faults(world.log, fault)
        receipts, error = await one.series([step(f"r{n}") for n in range(5)])
        assert (len(receipts), error) == (5, None)
        assert all(world.runs()[f"r{n}"] == 1 for n in range(5))
        assert receipts[-1].thread_seq == world.log.last_of(SUBJECTS.of("t"))

    test(main)


def test_a_full_log_ends_a_series_where_it_is_full() -> None:
    async def main(world: World, one: Instance) -> None:
        faults(world.log, "", "full")  # the first write of a new thread goes out alone
        receipts, error = await one.series([step(f"r{n}", n) for n in range(5)])
        assert (len(receipts), type(error)) == (1, LogFull)
        assert world.runs() == {"r0": 1}
        receipts, error = await one.series([step(f"r{n}", n) for n in range(5)])
        assert ([r.repeated for r in receipts], error) == ([True, False, False, False, False], None)

    test(main)


@pytest.mark.parametrize("fault", ["unavailable", "lost"])
def test_a_log_that_stays_away_ends_a_series_in_time(fault: str) -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint([])
        world.log.fault = lambda kind: fault if kind != "read" else "unavailable"
        receipts, error = await one.series([step(f"r{n}") for n in range(3)])
        assert receipts == []
        assert isinstance(error, LogUnavailable if fault == "unavailable" else OutcomeUnknown)

    test(main)


@pytest.mark.parametrize("turns", range(8))
def test_who_gives_a_series_up_gives_all_of_it_up(turns: int) -> None:
    async def main(world: World, one: Instance) -> None:
        task = asyncio.ensure_future(one.series([step(f"r{n}") for n in range(5)]))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await one.append(["last"])
        stored = [f"r{n}" in world.runs() for n in range(5)]
        assert stored == sorted(stored, reverse=True), "no holes"
        assert (await world.messages())[-1] == "last"

    test(main)


def test_a_series_that_closing_meets_ends() -> None:
    async def main(world: World, one: Instance) -> None:
        task = asyncio.ensure_future(one.series([step(f"r{n}") for n in range(5)]))
        await asyncio.sleep(0)
        await one.aclose()
        receipts, error = await task
        assert len(receipts) == sum(world.runs().values())
        assert (error is None) is (len(receipts) == 5)
        with pytest.raises(Closed):
            await one.series([step("late")])

    test(main)


@examples(100)
@given(
    seed=st.integers(0, 2**32),
    share=st.floats(0, 0.6),
    kinds=st.sets(st.sampled_from(WRITE_FAULTS[1:]), max_size=4),
)
def test_whatever_fails_a_series_leaves_no_hole(seed: int, share: float, kinds: set[str]) -> None:
    chance = random.Random(seed)

    async def main() -> None:
        world = World()
        writers = [Instance(world), Instance(world)]

        def fault(kind: str) -> str:
            if not kinds or chance.random() >= share:
                return ""
            return chance.choice(sorted(kinds)) if kind != "read" else chance.choice(["", "", "unavailable"])

        world.log.fault = fault
        wanted: list[tuple[str, list[str], asyncio.Future[tuple[list[Receipt], Exception | None]]]] = []
        for number in range(chance.randint(1, 8)):
            thread = f"t{chance.randrange(2)}"
            names = [f"{number}.{n}" for n in range(chance.randint(1, 6))]
            # Two messages may have the same id: the later one is refused, unless the earlier was not stored.
            steps = [step(name, **({"id": "one"} if chance.random() < 0.1 else {})) for name in names]
            task = asyncio.ensure_future(chance.choice(writers).series(steps, thread))
            wanted.append((thread, names, task))
            for _ in range(chance.choice([0, 0, 1, 5, 20])):
                await asyncio.sleep(0)
            if chance.random() < 0.1:
                chance.choice(wanted)[2].cancel()
        found = await asyncio.gather(*(task for *_, task in wanted), return_exceptions=True)
        world.log.fault = lambda kind: ""
        await asyncio.sleep(20)  # units whose callers have gone are sent again

        for (thread, names, _), outcome in zip(wanted, found, strict=True):
            runs = world.runs(thread)
            times = [runs[name] for name in names]
            assert times == sorted(times, reverse=True), "no holes"
            assert max(times) <= 1, "none twice"
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, asyncio.CancelledError), outcome
                continue
            receipts, error = outcome
            assert all(times[: len(receipts)])
            entries = {i.entry.id: i.seq for i in world.tail(thread) if isinstance(i, StoredEntry)}
            assert [entries[r.id] for r in receipts] == [r.thread_seq for r in receipts]
            assert (error is None) is (len(receipts) == len(names))
            if isinstance(error, (Rejected, Unavailable)):
                assert sum(times) == len(receipts), error
            else:
                assert error is None or isinstance(error, OutcomeUnknown), error
        for one in writers:
            await one.aclose()

    run(main())
