"""Postgres fails over between a flush and the read that has waited for it: the copy lacks what was flushed last."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
import pytest

from bufstore import (
    AlreadyExists,
    BufferConfig,
    BufferedThreadStore,
    Children,
    Closed,
    Consistency,
    LineageError,
    LogConfig,
    MemoryThreadStore,
    RunStatus,
    StoreUnavailable,
)
from bufstore.buffer.read.same_postgres import SamePostgres
from bufstore.buffer.read.store_watch import StoreWatch
from bufstore.langgraph import AsyncBufferedSaver, MemoryCheckpointStore
from bufstore.memory import MemoryNats
from helpers import run_of
from langgraph_savers import META, checkpoint, config
from unit.fake_log import run
from unit.test_buffered_in_memory import instance


class GoesBack:
    """Has the tables of a store in memory go back, as a failover does, just before a method of it answers."""

    def __init__(self, store: Any, ledger: Any, names: list[str]) -> None:
        self._tables = [getattr(store, name) for name in names] + [ledger._rows, ledger._cursors]
        self._ledger = ledger
        self._store, self._kept = store, [copy.deepcopy(table) for table in self._tables]
        self.times = 0

    def before(self, method: str) -> None:
        answer: Callable[..., Awaitable[Any]] = getattr(self._store, method)

        async def after(*args: Any, **kwargs: Any) -> Any:
            if not self.times:
                self.go()
            return await answer(*args, **kwargs)

        setattr(self._store, method, after)

    def go(self) -> None:
        self.times += 1
        self._ledger.run = "the copy"
        for table, kept in zip(self._tables, self._kept, strict=True):
            table.clear()
            table.update(kept)


@asynccontextmanager
async def threads(inner: MemoryThreadStore, nats: MemoryNats) -> AsyncIterator[tuple[BufferedThreadStore, GoesBack]]:
    """A store with a thread "p", and the Postgres that goes back to its first message."""
    async with instance(nats, inner) as store:
        await store.checkpoint("p", ["one"], run_of("p"))
        await store.force_flush_all()
        yield store, GoesBack(inner, inner.ledger(0), ["_threads", "_messages", "_runs"])


@pytest.mark.parametrize("what", ["threads", "runs", "messages", "range", "run", "delete"])
def test_lists_and_deletions_of_threads_look_again(what: str) -> None:
    """Regression: a list lacked what it had shown before, and a parent was deleted whose child the copy lacked."""

    async def main() -> None:
        inner, nats = MemoryThreadStore(), MemoryNats()
        async with threads(inner, nats) as (store, postgres):
            await store.checkpoint_append("p", ["two"], run_of("p", 1))
            await store.checkpoint("c", ["one"], run_of("c", parent_thread_id="p"))
            await store.force_flush_all()
            match what:
                case "threads":
                    postgres.before("query_threads")
                    assert {t.thread_id for t in (await store.query_threads()).threads} == {"p", "c"}
                case "runs":
                    postgres.before("query_runs")
                    assert len((await store.query_runs()).runs) == 3
                case "messages":
                    postgres.before("query_messages")
                    assert len((await store.query_messages("p")).records) == 2
                case "range":
                    postgres.before("load_message_range")
                    assert len(await store.load_message_range("p", 1, 9)) == 2
                case "run":
                    nats.buckets["thread-hot"].clear()
                    missing = run_of("p", 1)
                    load, looks = inner.load_run, 0

                    async def not_yet(run_id: str) -> Any:
                        nonlocal looks
                        looks += 1
                        if looks == 2:
                            postgres.go()
                        return None if looks == 1 else await load(run_id)

                    inner.load_run = not_yet  # type: ignore[method-assign]
                    assert await store.load_run(missing.run_id) == missing
                case "delete":
                    postgres.before("query_threads")
                    with pytest.raises(LineageError):
                        await store.delete_thread("p", children=Children.REJECT)
            assert postgres.times == 1

    run(main())


@pytest.mark.parametrize("what", ["load", "strong", "create"])
def test_a_run_is_that_of_the_postgres_that_told_of_its_thread(what: str) -> None:
    """Regression: a run was not there, or as it had been before, and could be created over again."""

    async def main() -> None:
        inner, nats = MemoryThreadStore(), MemoryNats()
        async with threads(inner, nats) as (store, postgres):
            done = msgspec.structs.replace(run_of("p", 1), status=RunStatus.DONE, output="the answer")
            await store.checkpoint_append("p", ["two"], done)
            await store.checkpoint_append("p", ["three"], run_of("p", 2))
            await store.force_flush_all()
            load = inner.load_run

            async def late(run_id: str) -> Any:
                if run_id == done.run_id and not postgres.times:
                    postgres.go()
                return await load(run_id)

            inner.load_run = late  # type: ignore[method-assign]
            async with instance(nats, inner, flusher=False) as other:  # it remembers nothing of the thread
                if what == "create":
                    with pytest.raises(AlreadyExists):
                        await other.create_run(run_of("p", 1))
                else:
                    level = Consistency.STRONG if what == "strong" else Consistency.READ_YOUR_WRITES
                    assert await other.load_run(done.run_id, consistency=level) == done
                assert postgres.times == 1
                await store.force_flush_all()
            assert await store.load_run(done.run_id) == done

    run(main())


@pytest.mark.parametrize("what", ["list", "runs", "prune idle", "copy"])
def test_lists_and_deletions_of_checkpoints_look_again(what: str) -> None:
    """Regression: a value was deleted that the newest checkpoint names, and a thread that was not idle."""

    async def main() -> None:
        store = MemoryCheckpointStore()
        settings = BufferConfig(log=LogConfig(partitions=2), flush_interval_s=0.05, lease_s=4)
        saver = await AsyncBufferedSaver.open(store, nats=MemoryNats(), config=settings)
        at: Any = config("t")
        old = (datetime.now(UTC) - timedelta(days=60)).isoformat()
        for n in ("1", "2"):
            saved = checkpoint({"a": n, "b": n}, {"a": [n], "b": [n]}) | {"ts": old}
            at = await saver.aput(at, saved, META | {"run_id": n}, {"a": n, "b": n})  # type: ignore[arg-type]
        await saver.force_flush()
        postgres = GoesBack(store, saver.engine.buffer.ledger, ["_threads"])
        newest = checkpoint({"a": "3", "b": "2"}, {"a": ["3"], "b": ["2"]})
        await saver.aput(at, newest, META | {"run_id": "3"}, {"a": "3"})  # type: ignore[arg-type]
        await saver.force_flush()
        match what:
            case "list":
                postgres.before("page")
                assert len([found async for found in saver.alist(config("t"))]) == 3
            case "runs":
                postgres.before("outlines")
                await saver.adelete_for_runs(["2"])
            case "prune idle":

                async def idle(_: str) -> list[str]:
                    return ["t"]

                store.idle = idle  # type: ignore[method-assign]
                postgres.before("outlines")
                assert await saver.aprune_idle(timedelta(days=30), strategy="delete") == []
            case "copy":
                postgres.before("page")
                await saver.acopy_thread("t", "copied")
        assert postgres.times == 1
        await saver.force_flush()
        for thread_id in ("t", *(["copied"] if what == "copy" else ())):
            found = await saver.aget_tuple(config(thread_id))
            assert found is not None and found.checkpoint["channel_values"] == {"a": ["3"], "b": ["2"]}
        await saver.aclose()

    run(main())


def test_a_question_that_falls_silent_holds_up_nobody_else() -> None:
    """Regression: one connection without an answer stopped all lists of the process for 30 s."""

    class Silent:
        def __init__(self) -> None:
            self.asked = 0

        async def server_run(self) -> str:
            self.asked += 1
            if self.asked == 2:
                await asyncio.sleep(30)
            return "a run"

        async def answers(self) -> None:
            pass

    async def main() -> None:
        ledger = Silent()
        watch: StoreWatch[Any] = StoreWatch(cast(Any, ledger), 10.0)
        postgres = SamePostgres(cast(Any, ledger), watch, 10.0)
        assert await postgres.now() == "a run"
        began = asyncio.get_running_loop().time()
        assert await asyncio.gather(*(postgres.now() for _ in range(3))) == ["a run"] * 3
        assert asyncio.get_running_loop().time() - began < 3
        assert ledger.asked == 3
        await postgres.aclose()
        await watch.aclose()

    run(main())


class Busy:
    """A store that answers one question, and then nobody who asks whether it is there."""

    def __init__(self) -> None:
        self.probed = asyncio.Event()

    async def answers(self) -> None:
        self.probed.set()
        await asyncio.sleep(30)

    async def state(self, thread_id: str) -> str:
        await self.probed.wait()
        return thread_id


@pytest.mark.parametrize("call", ["in_time", "while_up", "stored"])
def test_an_answer_of_the_store_counts_although_the_question_whether_it_is_away_hangs(call: str) -> None:
    """Regression: who waited for the answer waited for that question, too: late, or with no answer after its time."""

    async def main() -> None:
        store, clock = Busy(), asyncio.get_running_loop().time
        watch: StoreWatch[Any] = StoreWatch(cast(Any, store), 10.0)  # it waits for two seconds for `answers`
        began = clock()
        match call:
            case "in_time":
                found = await watch.in_time(store.state("t"), 2.5)
            case "while_up":
                found = await watch.while_up(store.state("t"))
            case _:
                found = await watch.stored(watch.ask("t"), began + 10.0)
        assert (found, watch.down) == ("t", None)
        assert clock() - began < 1.5, "the question begins after a second, and is given up after three"
        await watch.aclose()

    run(main())


@pytest.mark.parametrize("what", ["hangs", "fails"])
def test_a_read_that_outlasts_its_store_leaves_nobody_behind_who_asks_whether_postgres_is_back(what: str) -> None:
    """Regression: a task asked the closed store four times a second, as long as the program went on."""

    class Closing:
        """A store that is closed while it does not answer a read."""

        def __init__(self) -> None:
            self.closed = asyncio.Event()

        async def state(self, thread_id: str) -> str:
            await self.closed.wait()
            if what == "hangs":
                await asyncio.sleep(30)
            raise StoreUnavailable("the connection was closed")

        async def answers(self) -> None:
            raise Closed("the store is closed")

    async def main() -> None:
        store = Closing()
        watch: StoreWatch[Any] = StoreWatch(cast(Any, store), 10.0)
        asked = watch.ask("t")
        reading = asyncio.create_task(watch.stored(asked, 10.0))
        await asyncio.sleep(0.5)
        await watch.aclose()
        store.closed.set()
        with pytest.raises(Closed):
            await reading
        watch.let_go(asked)
        assert watch.down is None
        await asyncio.sleep(0.1)

    run(main())
