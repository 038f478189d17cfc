"""Reads that join the store with the log: never silently older than what was acknowledged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bufstore import BufferedThreadStore, MemoryThreadStore
from bufstore.buffer.ports.ledger import Cursor
from bufstore.errors import BufstoreError, Closed, FlushTimeout, LogUnavailable, ReadNotFresh, StoreUnavailable
from bufstore.memory import MemoryNats
from bufstore.tasks import StrayCancelledError
from bufstore.threads.model import Run, decode_message
from bufstore.threads.state import ThreadState
from bufstore.types import Consistency
from unit.fake_log import run
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


def test_an_older_copy_of_postgres_that_answered_just_before_a_failover_is_not_shown() -> None:
    """The log no longer shows what the copy lacks, and only the connection to another Postgres tells of it."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.flush()
        two = Instance(world)
        before = await two.reads._reader.state("t")
        await one.append(["b"])
        await world.flush_and_purge()
        state, ends = two.reads._reader.state, two.log.ends

        async def of_the_copy(_: str) -> ThreadState:
            two.reads._with_waiting._reader.state = state  # type: ignore[method-assign]
            return before

        async def then_another_answers(subjects: Any) -> list[int]:
            found = await ends(subjects)
            await asyncio.sleep(1)  # meanwhile the copy has answered
            world.reached.connections = 1  # type: ignore[attr-defined]
            return found

        two.reads._with_waiting._reader.state = of_the_copy  # type: ignore[method-assign]
        two.log.ends = then_another_answers  # type: ignore[method-assign]
        found, _ = await two.reads.joined("t")
        assert [decode_message(m) for m in found.messages] == ["a", "b"]

    test(main)


@pytest.mark.parametrize("who", ["read", "append"])
def test_postgres_that_answers_late_is_still_joined_with_the_tail(who: str) -> None:
    """Postgres seems to be down, the log holds only the tail of the thread, and then Postgres answers after all."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.flush_and_purge()
        one.appender.forget("t")
        await one.append(["b"])  # a delta: the log alone does not show the thread
        two = Instance(world)
        two.reads.store.down = "it did not answer in time"
        if who == "read":
            assert await shown(two) == ["a", "b"]
        else:
            await two.append(["c"])
            await world.flush()
            assert world.ledger.parked.entries == {}
            assert await world.messages() == ["a", "b", "c"]

    test(main)


@pytest.mark.parametrize("behind", [1, 2])
def test_a_position_is_never_told_without_what_stands_there(behind: int) -> None:
    """Postgres seems to be down, and the thread's first entry comes after one of the looks into the log. A writer that
    took its position for that of an empty thread would build on nothing."""

    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        two.reads.store.down = "it did not answer in time"
        looks = 0

        def watched(look: Any) -> Any:
            async def then_written(*arguments: Any, **options: Any) -> Any:
                nonlocal looks
                found = await look(*arguments, **options)
                looks += 1
                if looks == behind:
                    await one.checkpoint(["a"])
                return found

            return then_written

        world.log.after, world.log.last = watched(world.log.after), watched(world.log.last)  # type: ignore[method-assign]
        await two.append(["b"])
        assert looks >= behind
        await world.flush()
        assert world.ledger.parked.entries == {}
        assert await world.messages() == ["a", "b"]

    test(main)


def test_an_app_store_that_raises_its_drivers_errors_is_found_again_when_it_is_back() -> None:
    """The probe for a Postgres that is back must outlive any error of an app's own store."""

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
        assert one.reads.store.down is None

    test(main)


def test_a_run_from_before_the_snapshot_that_the_log_begins_with_is_not_said_to_be_missing() -> None:
    """Postgres seems to be down, and a run that it lacks was written before the log's first snapshot."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"], run_id="r0")
        await world.flush_and_purge()
        one.appender.forget("t")
        await one.append(["b"], run_id="r1")
        await one.checkpoint(["z"], run_id="r2")
        two = Instance(world)
        two.reads.store.down = "it did not answer in time"
        state, _ = await two.reads.joined("t")
        assert [decode_message(m) for m in state.messages] == ["z"]

        async def read() -> ThreadState:
            return state

        assert (await two.runs.of("r2", read))[1] is not None
        with pytest.raises(StoreUnavailable):
            await two.runs.of("r1", read)
        two.reads.store.down = None
        for run_id in ("r0", "r1", "r2", "r3"):
            assert ((await two.runs.of(run_id, read))[1] is not None) is (run_id != "r3")

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


def slow_threads(one: Instance, delays: dict[str, float]) -> None:
    """Let the store take so long to read these threads, and no time for anything else."""
    state = one.reads._reader.state

    async def slowly(thread_id: str) -> Any:
        await asyncio.sleep(delays.get(thread_id, 0.0))
        return await state(thread_id)

    one.reads._reader.state = slowly  # type: ignore[method-assign]


@pytest.mark.parametrize("takes_s", [1.5, 2.5, 9.0])
def test_a_thread_that_takes_the_store_long_is_read_and_makes_no_other_wait(takes_s: float) -> None:
    async def main(world: World, one: Instance) -> None:
        for thread_id in ("slow", "quick"):
            await one.checkpoint(["a"], thread_id)
            await world.flush(thread_id)
        await world.flush_and_purge("slow")
        slow_threads(one, {"slow": takes_s})
        one.appender.forget("slow")
        read = asyncio.create_task(shown(one, "slow"))
        write = asyncio.create_task(one.append(["b"], "slow"))
        began = asyncio.get_running_loop().time()
        while not read.done():
            await asyncio.sleep(0.2)
            assert one.reads.store.down is None, "one slow thread says nothing of the others"
            before = asyncio.get_running_loop().time()
            assert await shown(one, "quick") == ["a"]
            assert asyncio.get_running_loop().time() - before < 0.1
        assert await read in (["a"], ["a", "b"])
        assert asyncio.get_running_loop().time() - began < takes_s + 1
        await write
        await world.flush("slow")
        assert world.ledger.parked.entries == {}

    test(main)


def test_a_thread_that_takes_the_store_longer_than_a_read_may_take_says_so() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"], "slow")
        await world.flush_and_purge("slow")
        slow_threads(one, {"slow": 60.0})
        with pytest.raises(StoreUnavailable, match="read_timeout_s"):
            await one.reads.joined("slow")
        assert one.reads.store.down is None
        with pytest.raises((ReadNotFresh, StoreUnavailable)):
            await shown(one, "slow")

    test(main)


def test_an_eventual_read_that_ends_late_says_that_the_store_did_not_answer() -> None:
    """Regression: it said "in time" alone, also where the store was known to be down, and why."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"], "slow")
        await world.flush("slow")
        slow_threads(one, {"slow": 60.0})
        for known, says in (
            (None, ": the store did not answer"),
            ("no space left", "; the store counts as away: no space"),
        ):
            one.reads.store.down = known
            with pytest.raises(ReadNotFresh, match=f"within 10 s{says}"):
                await one.reads.thread("slow", Consistency.EVENTUAL)
        one.reads.store.down = None

    test(main)


def test_a_time_that_an_apps_own_store_gave_itself_is_not_told_as_the_limit_of_reads() -> None:
    async def main(world: World, one: Instance) -> None:
        async def gives_up(thread_id: str) -> Any:
            raise TimeoutError

        one.reads._reader.state = gives_up  # type: ignore[method-assign]
        with pytest.raises(ReadNotFresh, match="as eventual: the store's own call timed out"):
            await one.reads.thread("t", Consistency.EVENTUAL)

    test(main)


@pytest.mark.parametrize("kept", [False, True])
def test_a_read_that_a_hanging_store_does_not_answer_is_told_by_the_log_in_its_time(kept: bool) -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        if kept:
            await world.flush()
            assert await shown(one) == ["a"]

        async def hangs(*_: str) -> Any:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(10)  # as psycopg waits for the end of a statement that it cancels
                raise

        one.reads._reader.state = hangs  # type: ignore[method-assign]
        one.reads._reader.answers = hangs  # type: ignore[method-assign]
        one.reads._with_waiting.watermark = hangs  # type: ignore[method-assign]
        began = asyncio.get_running_loop().time()
        assert await shown(one) == ["a"]
        assert asyncio.get_running_loop().time() - began < world.config.read_timeout_s / 2
        assert one.reads.store.down is not None
        assert await shown(one) == ["a"]
        with pytest.raises(StoreUnavailable, match="did not answer in time"):
            await shown(one, "another")

    test(main)


def test_a_store_whose_reads_are_cancelled_counts_as_away_until_it_answers() -> None:
    """Regression: an app cancelled what its own store awaited, which ended the probe, and the store stayed away."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.flush()

        async def cancelled(*_: str) -> Any:
            raise asyncio.CancelledError

        reads = world.store.load_checkpoint, world.store.load_run
        world.store.load_checkpoint = world.store.load_run = cancelled  # type: ignore[method-assign, assignment]
        assert await shown(one) == ["a"]
        with pytest.raises(StrayCancelledError):
            await shown(one, "another")
        assert one.reads.store.down is not None
        await asyncio.sleep(1)
        world.store.load_checkpoint, world.store.load_run = reads  # type: ignore[method-assign]
        await asyncio.sleep(1)
        assert one.reads.store.down is None
        assert await shown(one) == ["a"]

    test(main)


def test_a_store_that_fails_when_nobody_waits_for_it_any_more_leaves_no_complaint() -> None:
    """`test` fails on an exception that nobody retrieved."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])

        over = asyncio.Event()

        async def fails_late(_: str) -> Any:
            await over.wait()
            raise StoreUnavailable("the connection was closed")

        async def fails(*_: str) -> Any:
            raise StoreUnavailable("no connection")

        tail = one.reads._log.seen_after

        async def tail_while_it_fails(*args: Any) -> Any:
            over.set()
            return await tail(*args)

        one.reads._log.seen_after = tail_while_it_fails  # type: ignore[method-assign]
        one.reads._reader.state = fails_late  # type: ignore[method-assign]
        one.reads._reader.answers = fails  # type: ignore[method-assign]
        assert await shown(one) == ["a"]
        assert over.is_set()

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


def test_a_read_that_a_close_overtakes_while_the_store_hangs_says_so() -> None:
    """Regression: it ended with CancelledError, although nobody had cancelled it."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.flush_and_purge()
        asked = asyncio.Event()

        async def hangs(*_: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        watch = one.reads.store
        reading = asyncio.create_task(watch.while_up(hangs()))
        watch._reader.answers = hangs  # type: ignore[method-assign]
        await asked.wait()
        while watch._question is None:  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(0.1)
        await watch.aclose()
        with pytest.raises(Closed):
            await reading

    test(main)


def test_a_list_or_run_whose_answer_an_apps_store_cancels_itself_fails_like_any_other() -> None:
    """Regression: it ended with CancelledError, which a group of tasks takes for its own."""

    class Resets(MemoryThreadStore):
        async def query_threads(self, *_: Any, **__: Any) -> Any:
            return await self.load_run("r")

        async def load_run(self, run_id: str) -> Any:
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            answer.cancel()
            return await answer

    async def main() -> None:
        async with await BufferedThreadStore.open(Resets(), nats=MemoryNats()) as store:
            for level in (Consistency.EVENTUAL, RYW):
                with pytest.raises(StrayCancelledError):
                    await store.query_threads(consistency=level)
                with pytest.raises(StrayCancelledError):
                    await store.load_run("r", consistency=level)

    run(main())


def test_a_read_outlives_a_restart_of_the_log() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.flush()
        loop = asyncio.get_running_loop()
        back_at = loop.time() + 3.0
        world.log.fault = lambda kind: "unavailable" if loop.time() < back_at else ""
        asked, ask = 0, one.reads.store.ask

        def counted(thread_id: str) -> asyncio.Task[ThreadState]:
            nonlocal asked
            asked += 1
            return ask(thread_id)

        one.reads.store.ask = counted  # type: ignore[method-assign]
        states = await asyncio.gather(*(one.reads.thread("t", RYW) for _ in range(5)))
        assert asked <= 10, "the store is not asked for the whole thread at each try"
        assert [[decode_message(m) for m in state.messages] for state in states] == [["a"]] * 5
        assert loop.time() < back_at + 1

    test(main)


class AllFlushed:
    """A FlushWaiter for whom everything is flushed already."""

    async def thread(self, *_: object) -> None:
        pass

    async def partitions(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("call", ["force_flush", "force_flush_all", "strong"])
def test_who_waits_for_a_flush_outlives_a_restart_of_the_log(call: str) -> None:
    """Regression: force_flush, and with it the lists of a saver, failed at once, where reads and writes waited."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.flush()
        one.reads._waiter = AllFlushed()  # type: ignore[assignment]
        loop = asyncio.get_running_loop()
        back_at = loop.time() + 3.0
        world.log.fault = lambda kind: "unavailable" if loop.time() < back_at else ""
        match call:
            case "force_flush":
                await one.reads.force_flush("t", 30.0)
            case "force_flush_all":
                await one.reads.force_flush_all(30.0)
            case _:
                assert (await one.reads.thread("t", Consistency.STRONG)).watermark.flushed_seq
        assert back_at <= loop.time() < back_at + 1

    test(main)


@pytest.mark.parametrize("strong", [False, True])
def test_a_restart_of_the_log_after_its_answer_ends_no_wait_for_a_flush(strong: bool) -> None:
    """What Postgres says counts only by what the log has below its floor."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        await world.flush_and_purge()
        two, loop = Instance(world), asyncio.get_running_loop()
        two.reads._waiter = AllFlushed()  # type: ignore[assignment]
        latest, back_at = two.log.latest, float("inf")

        async def cursors() -> dict[int, Cursor]:
            partition = two.reads._subjects.partition("t")
            return {partition: Cursor(partition, 1, two.log.floor, 0)}  # the others were never written to

        async def then_away(subject: str, timeout_s: float) -> int:
            nonlocal back_at
            found = await latest(subject, timeout_s)
            if back_at == float("inf"):
                back_at = loop.time() + 3.0
                world.log.fault = lambda kind: "unavailable" if loop.time() < back_at else ""
            return found

        world.reached.cursors = cursors  # type: ignore[method-assign]
        two.log.latest = then_away  # type: ignore[method-assign]
        if strong:
            await two.reads.thread("t", Consistency.STRONG)
        else:
            await two.reads.force_flush("t", 30.0)
        assert back_at <= loop.time() < back_at + 1

    test(main)


def expired_then_silent() -> Any:
    """Return a question to the log that is refused for a reason the first time, and then never answered."""
    answers = iter([LogUnavailable("the certificate has expired")])

    async def ask(*_: Any, **__: Any) -> int:
        for error in answers:
            raise error
        return await asyncio.get_running_loop().create_future()

    return ask


@pytest.mark.parametrize(("timeout_s", "error"), [(4.0, FlushTimeout), (30.0, LogUnavailable)])
def test_a_flush_that_the_log_does_not_answer_tells_why(timeout_s: float, error: type[BufstoreError]) -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        one.reads._log.latest = expired_then_silent()  # type: ignore[method-assign]
        with pytest.raises(error, match="the certificate has expired"):
            await one.reads.force_flush("t", timeout_s)

    test(main)


def test_an_outage_of_the_log_that_goes_on_is_told_to_later_reads_at_once() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        loop = asyncio.get_running_loop()
        for hours in (0, 3600):
            await asyncio.sleep(hours)
            world.log.fault = lambda kind: "unavailable"
            began = loop.time()
            for _ in range(3):
                with pytest.raises(ReadNotFresh):
                    await shown(one)
                assert 4.0 < loop.time() - began < 6.0, "the first one waits, the others do not"
                await asyncio.sleep(0)
            world.log.fault = lambda kind: ""
            if hours == 0:
                continue  # the next outage is another one although no read came between
            assert await shown(one) == ["a"]

    test(main)


def test_a_read_that_ends_late_tells_why_the_log_did_not_answer_before() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        one.reads._last = expired_then_silent()  # type: ignore[method-assign]
        with pytest.raises(ReadNotFresh, match="within 10 s: the certificate has expired"):
            await shown(one)
        await asyncio.sleep(3600)
        with pytest.raises(ReadNotFresh, match=r"within 10 s$"):
            await shown(one, "another")

    test(main)


def test_errors_of_a_read_are_bufstores_own() -> None:
    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["a"])
        world.log.fault = lambda kind: "unavailable"
        with pytest.raises(BufstoreError):
            await shown(one)
        world.log.fault = lambda kind: ""

    test(main)
