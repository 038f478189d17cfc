"""Reads that join the store with the log: never silently older than what was acknowledged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bufstore.errors import BufstoreError, StoreUnavailable
from bufstore.threads.model import Run, decode_message
from bufstore.types import Consistency
from unit.test_appender import Instance, World, test

RYW = Consistency.READ_YOUR_WRITES


async def shown(one: Instance, thread_id: str = "t") -> list[Any]:
    state = await one.reads.thread(thread_id, RYW)
    return [decode_message(m) for m in state.messages]


def test_a_read_joins_store_and_tail() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.flush()
        await one.append(["b"])
        assert await shown(one) == ["a", "b"]

    test(main)


@pytest.mark.parametrize("who", ["read", "append"])
def test_postgres_that_answers_late_is_still_joined_with_the_tail(who: str) -> None:
    """Postgres seems to be down, the log holds only the tail of the thread, then Postgres answers after all."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.flush_and_purge()
        one.appender.forget("t")
        await one.append(["b"])  # a delta: the log alone does not tell the thread
        two = Instance(world)
        two.reads.store_down = "it did not answer in time"
        if who == "read":
            assert await shown(two) == ["a", "b"]
        else:
            await two.append(["c"])
            await world.flush()
            assert world.ledger.parked.entries == {}
            assert await world.messages() == ["a", "b", "c"]

    test(main)


def test_a_position_is_never_told_without_what_stands_there() -> None:
    """Postgres seems to be down, and the thread's first entry comes between two looks into the log: a writer that took
    its position for that of an empty thread would write behind it, unfounded."""

    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        two.reads.store_down = "it did not answer in time"
        after, calls = world.log.after, 0

        async def then_written(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            found = await after(*arguments, **options)
            calls += 1
            if calls == 2:
                await one.checkpoint(["a"])
            return found

        world.log.after = then_written  # type: ignore[method-assign]
        await two.append(["b"])
        await world.flush()
        assert world.ledger.parked.entries == {}
        assert await world.messages() == ["a", "b"]

    test(main)


def test_an_app_store_that_raises_its_drivers_errors_is_found_again_when_it_is_back() -> None:
    """The probe that looks whether Postgres is back must outlive any error of an app's own store."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.flush()
        world.store_is_up = False
        load_run = world.store.load_run

        async def broken(run_id: str) -> Run | None:
            raise ConnectionResetError("a driver's own error")

        world.store.load_run = broken  # type: ignore[method-assign]
        assert await shown(one) == ["a"], "the log still tells"
        await asyncio.sleep(3)
        world.store.load_run = load_run  # type: ignore[method-assign]
        world.store_is_up = True
        await asyncio.sleep(3)
        assert one.reads.store_down is None

    test(main)


def test_a_run_from_before_the_snapshot_that_the_log_begins_with_is_not_said_to_be_missing() -> None:
    """Postgres seems to be down, and what it does not have yet of the thread's runs stands before that snapshot."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"], run_id="r0")
        await world.flush_and_purge()
        one.appender.forget("t")
        await one.append(["b"], run_id="r1")
        await one.checkpoint(["z"], run_id="r2")
        two = Instance(world)
        two.reads.store_down = "it did not answer in time"
        state, _ = await two.reads.joined("t")
        assert [decode_message(m) for m in state.messages] == ["z"]
        assert await two.reads.has_run("r2", state)
        with pytest.raises(StoreUnavailable):
            await two.reads.has_run("r1", state)
        two.reads.store_down = None
        for run_id in ("r0", "r1", "r2", "r3"):
            assert await two.reads.has_run(run_id, state) is (run_id != "r3")

    test(main)


def test_a_read_without_postgres_shows_what_the_log_alone_tells() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await one.append(["b"])
        world.store_is_up = False
        assert await shown(one) == ["a", "b"]
        with pytest.raises(StoreUnavailable):
            await shown(one, "another")

    test(main)


def test_a_read_during_a_flush_is_one_or_the_other_state() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint([0])
        for n in range(1, 30):
            await one.append([n])
            reads = [asyncio.ensure_future(shown(one)) for _ in range(4)]
            await asyncio.sleep(0)
            if n % 3 == 0:
                await world.flush()
            for read in reads:
                assert (await read)[: n + 1] == list(range(n + 1))

    test(main)


def test_errors_of_a_read_are_bufstores_own() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        world.log.fault = lambda kind: "unavailable"
        with pytest.raises(BufstoreError):
            await shown(one)
        world.log.fault = lambda kind: ""

    test(main)
