"""Servers that stop, die, hang and come back under load."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import nats
import pytest

import bufstore
from bufstore import (
    BufferedThreadStore,
    Consistency,
    LogFull,
    LogRolledBack,
    LogUnavailable,
    MessageQuery,
    OutcomeUnknown,
    ReadNotFresh,
    Receipt,
    RunQuery,
    StoreUnavailable,
    ThreadQuery,
    TooLarge,
    Unavailable,
)
from bufstore.buffer.groups.sequencer import Sequencer
from bufstore.buffer.places import group_of
from bufstore.embedded import Servers
from bufstore.jetstream.messages import Outgoing
from bufstore.tasks import end
from conftest import Deployment
from helpers import eventually, flush_all, fresh, healthy, run_of, said
from thorough import seldom


@pytest.mark.long  # twenty seconds; the short tests have chaos and outages too
async def test_ten_thousand_checkpoints_without_postgres(own_servers: Servers) -> None:
    deployment = Deployment(own_servers, max_bytes=512 << 20)
    async with deployment.store() as store:
        old = [fresh("old") for _ in range(250)]
        new = [fresh("new") for _ in range(250)]
        expected: dict[str, list[Any]] = {}

        async def talk(thread_id: str, steps: int, messages: list[Any]) -> None:
            for _ in range(steps):
                messages.append(said(len(messages), 200))
                await store.checkpoint(thread_id, messages, run_of(thread_id))
            expected[thread_id] = messages

        async def check(level: Consistency) -> None:
            for thread_id, messages in expected.items():
                assert await store.load_messages(thread_id, consistency=level) == messages

        await asyncio.gather(*(talk(t, 3, []) for t in old))
        await store.force_flush_all()
        own_servers.postgres.stop()
        appended = (await store.statistics()).appended
        await asyncio.gather(*(talk(t, 20, expected.get(t, [])) for t in [*old, *new]))
        assert (await store.statistics()).appended - appended == 10_000
        await check(Consistency.READ_YOUR_WRITES)
        for thread_id in expected:
            assert await store.load_run(run_of(thread_id).run_id) == run_of(thread_id)
            assert await store.latest_run(thread_id) == run_of(thread_id)
        own_servers.postgres.start()
        await store.force_flush_all()
        await check(Consistency.EVENTUAL)
        state = (await store.statistics()).flusher
        assert state.entries == 10_750
        assert await store.quarantined() == 0


@pytest.mark.long
async def test_a_flusher_says_soon_that_postgres_is_away(own_servers: Servers) -> None:
    """The outage is reported long before the flush times out, after half a minute."""
    async with Deployment(own_servers).store() as store:
        await store.checkpoint("t", ["before"], run_of("t"))
        await store.force_flush_all()
        own_servers.postgres.stop()
        await store.checkpoint("t", ["before", "after"], run_of("t"))

        async def told() -> bool:
            return "no connection to Postgres" in (await store.statistics()).flusher.trouble

        await eventually(told, 20)
        own_servers.postgres.start()
        await store.force_flush_all()
        assert not (await store.statistics()).flusher.trouble


async def test_what_only_postgres_can_answer_says_why_it_does_not(own_servers: Servers) -> None:
    """Regression: lists said that it "may have failed over", and the lookup of a run nothing at all."""
    deployment = Deployment(own_servers)
    async with deployment.store(read_timeout_s=6.0) as store:
        await store.checkpoint("t", ["before"], run_of("t"))
        await store.force_flush_all()
        own_servers.postgres.stop()
        calls: list[Awaitable[Any]] = [
            store.query_threads(ThreadQuery()),
            store.query_threads(ThreadQuery(), consistency=Consistency.EVENTUAL),
            store.query_runs(RunQuery()),
            store.query_messages("t", MessageQuery()),
            store.load_run("another"),
        ]
        for failed in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(failed, StoreUnavailable)
            assert "Connection refused" in str(failed)
        own_servers.postgres.start()
        await eventually(lambda: _answers(store), 20)


async def test_a_run_that_a_silent_nats_does_not_tell_is_no_fault_of_postgres(own_servers: Servers) -> None:
    """Regression: it was a StoreUnavailable, "only Postgres knows about run …: it does not answer"."""
    deployment = Deployment(own_servers)
    async with deployment.store(read_timeout_s=2.0) as store:
        await store.checkpoint("t", ["before"], run_of("t"))
        own_servers.nats.pause()
        try:
            with pytest.raises(ReadNotFresh, match=r"could not be looked up in time: .+") as caught:
                await store.load_run("another")
            assert "Postgres" not in str(caught.value)
        finally:
            own_servers.nats.resume()
        await healthy(store)


async def _answers(store: Any) -> bool:
    with suppress(Unavailable):
        return len((await store.query_threads(ThreadQuery())).threads) == 1
    return False


@asynccontextmanager
async def _begun_in_an_outage(deployment: Deployment, inner: Any = None) -> AsyncIterator[BufferedThreadStore]:
    """An app that began while Postgres is away, and has written; `inner`: its store, None for the deployment's."""
    async with deployment.store() as store:
        await store.checkpoint("t", ["before"], run_of("t"))
    deployment.servers.postgres.stop()
    async with deployment.store(inner) as store:
        await store.checkpoint("t", ["before", "after"], run_of("t"))
        yield store


async def test_a_log_that_is_enlarged_in_an_outage_is_flushed_after_it_by_apps_that_began_in_it(
    own_servers: Servers,
) -> None:
    """Regression: the app refused the log when Postgres was back, because it looked at its settings once more."""
    deployment = Deployment(own_servers)
    async with _begun_in_an_outage(deployment) as store:
        stream = store.buffer.session.stream
        config = (await stream.info())["config"]
        await stream.api(f"STREAM.UPDATE.{deployment.log.stream}", config | {"max_bytes": 2 * config["max_bytes"]})
        own_servers.postgres.start()
        await store.force_flush_all()
        await store.checkpoint("t", ["before", "after", "and on"], run_of("t"))
        await store.force_flush_all()
        assert (await store.health()).log == ""


async def test_an_app_that_began_in_an_outage_with_the_wrong_database_is_told_the_way_out_of_that(
    own_servers: Servers,
) -> None:
    """Regression: it was told to repair the log, which is as it should be."""
    deployment = Deployment(own_servers)
    deployment.verified = False  # it is refused, too
    async with _begun_in_an_outage(deployment, Deployment(own_servers).inner()) as store:
        own_servers.postgres.start()

        async def refused() -> bool:
            return bool((await store.statistics()).flusher.stopped)

        await eventually(refused, 20)
        with pytest.raises(LogRolledBack, match="database is") as caught:
            await store.checkpoint("t", ["before", "after", "more"], run_of("t"))
        assert "stop all instances" not in str(caught.value)
        health = await store.health()
        assert health.log == str(caught.value)
        assert health.flusher.endswith(health.log)
    async with deployment.store() as store:
        await store.force_flush_all()
        assert await _read(store, "t", Consistency.EVENTUAL) == [["before", "after"]]


@pytest.mark.long  # a start without Postgres
async def test_a_flush_asked_of_an_app_that_began_in_an_outage_rides_out_the_rest_of_it(own_servers: Servers) -> None:
    deployment = Deployment(own_servers)
    async with deployment.store() as store:
        await store.checkpoint("t", ["before"], run_of("t"))
        await store.force_flush_all()
    own_servers.postgres.stop()
    async with deployment.store(flusher=False, read_timeout_s=30.0) as store:
        restored, failed = store.buffer.reads.restored, 0
        prepare = restored.prepare
        assert prepare is not None

        async def counted() -> None:
            nonlocal failed
            failed += 1
            await prepare()
            failed = 0

        async def still_away() -> bool:
            return failed >= 5

        restored.prepare = counted
        calls = [
            asyncio.create_task(store.force_flush("unknown")),
            asyncio.create_task(store.load_messages("unknown", consistency=Consistency.STRONG)),
        ]
        await eventually(still_away)
        own_servers.postgres.start()
        assert await asyncio.gather(*calls) == [None, None]


class Writers:
    """Writers that append numbers to threads, and their acknowledgements."""

    def __init__(self, threads: int) -> None:
        self.thread_ids = [fresh() for _ in range(threads)]
        self.acknowledged: dict[str, list[int]] = {t: [] for t in self.thread_ids}
        self.attempted: dict[str, list[int]] = {t: [] for t in self.thread_ids}
        self.failed: list[BaseException] = []
        self.stop = asyncio.Event()

    async def write(self, store: Any, thread_id: str) -> None:
        """Append numbers until told to stop; retry an unknown outcome with its token, as documented."""
        number, key = 0, None
        while not self.stop.is_set():
            if key is None:
                number += 1
                self.attempted[thread_id].append(number)
            try:
                await store.checkpoint_append(thread_id, [number], run_of(thread_id), idempotency_key=key)
                self.acknowledged[thread_id].append(number)
                key = None
            except OutcomeUnknown as e:
                self.failed.append(e)
                key = e.token
            except (LogUnavailable, StoreUnavailable, ReadNotFresh) as e:
                self.failed.append(e)
                await asyncio.sleep(0.02)
                if key is None:
                    self.attempted[thread_id].pop()
                    number -= 1

    async def check(self, store: Any) -> None:
        """Check that every acknowledged number is stored once and in order, and no number that was not tried."""
        await flush_all(store)
        for thread_id in self.thread_ids:
            (found,) = await eventually(lambda t=thread_id: _read(store, t, Consistency.EVENTUAL), 60)  # type: ignore[misc]
            assert [found] == await eventually(lambda t=thread_id: _read(store, t), 60)  # type: ignore[misc]
            assert found == sorted(set(found)), "twice or out of order"
            assert set(self.acknowledged[thread_id]) <= set(found), "lost"
            assert set(found) <= set(self.attempted[thread_id]), "phantom"


async def test_an_apps_logging_that_raises_ends_nothing(own_servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the store was closed for good by the line that says that the connection is lost."""
    refused = []

    def raising(record: logging.LogRecord) -> bool:
        refused.append(record)
        raise KeyError("a field")

    log, thread_id = logging.getLogger("bufstore.jetstream.connection"), fresh()
    monkeypatch.setattr(log, "filter", raising)
    async with Deployment(own_servers).store() as store:
        await store.checkpoint_append(thread_id, [said(1)], run_of(thread_id))
        own_servers.nats.restart()
        await eventually(lambda: _written(store, thread_id, said(2)), 60)
        await store.force_flush(thread_id)
        assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == [said(1), said(2)]
    assert refused


async def _written(store: Any, thread_id: str, message: Any) -> bool:
    with suppress(LogUnavailable):
        await store.checkpoint_append(thread_id, [message], run_of(thread_id), idempotency_key="k")
        return True
    return False


async def _read(store: Any, thread_id: str, level: Consistency | None = None) -> list[Any] | None:
    """Return the thread's messages in a list; None when a server did not answer in time."""
    with suppress(Unavailable, ReadNotFresh):
        return [await store.load_messages(thread_id, consistency=level) or []]
    return None


def _restart_nats(servers: Servers) -> None:
    servers.nats.restart()


def _kill_nats(servers: Servers) -> None:
    servers.nats.kill()
    servers.nats.start()


def _kill_postgres(servers: Servers) -> None:
    servers.postgres.kill()
    servers.postgres.start()


def _hang(name: str, seconds: float) -> Callable[[Servers], None]:
    def hang(servers: Servers) -> None:
        import time

        server = getattr(servers, name)
        server.pause()
        time.sleep(seconds)
        server.resume()

    hang.__name__ = f"_hang_{name}"
    return hang


@pytest.mark.parametrize(
    "fault",
    [
        *(_kill_nats, _kill_postgres),
        *seldom(_restart_nats, _hang("nats", 4.0), _hang("nats", 1.5), _hang("postgres", 1.5)),
    ],
    ids=lambda f: f.__name__,
)
async def test_nothing_is_lost_or_doubled_when_a_server(own_servers: Servers, fault: Any) -> None:
    deployment = Deployment(own_servers)
    writers = Writers(20)
    timeouts = {"append_timeout_s": 2.0, "read_timeout_s": 2.0}
    async with deployment.store(**timeouts) as one, deployment.store(**timeouts) as two:
        stores = [one, two]
        tasks = [asyncio.create_task(writers.write(stores[i % 2], t)) for i, t in enumerate(writers.thread_ids)]
        for _ in range(2):
            before = sum(map(len, writers.acknowledged.values()))
            await eventually(lambda b=before: _more(writers, b))  # type: ignore[misc]
            await asyncio.to_thread(fault, own_servers)
        before = sum(map(len, writers.acknowledged.values()))
        await eventually(lambda: _more(writers, before))
        writers.stop.set()
        await asyncio.gather(*tasks)
        await writers.check(one)


async def _reached(count: Callable[[], int], than: int) -> bool:
    return count() >= than


async def _more(writers: Writers, than: int) -> bool:
    return sum(map(len, writers.acknowledged.values())) > than + 200


async def test_a_lost_answer_is_resolved_without_the_caller(own_servers: Servers) -> None:
    """The entry is stored and its answer is lost: the call still succeeds, and the entry is stored once."""
    deployment = Deployment(own_servers)
    async with deployment.store(flusher=False) as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        stream = store.buffer.session.stream  # type: ignore[attr-defined]
        publish, lost = stream.publish, []

        async def deaf(message: Any, timeout_s: float) -> int:
            from bufstore.jetstream.messages import AppendUnknown

            seq = await publish(message, timeout_s)
            if not lost:
                lost.append(seq)
                raise AppendUnknown("the test dropped the answer")
            return seq

        stream.publish = deaf
        receipt = await store.checkpoint_append(thread_id, [said(1)], run_of(thread_id))
        assert group_of(receipt.thread_seq) == lost[0]
        assert await store.load_messages(thread_id) == [said(0), said(1)]
        assert len(await store.buffer.log.after(store.buffer.subjects.of(thread_id), 0)) == 2


async def test_an_unknown_outcome_can_be_retried_with_its_token(own_servers: Servers) -> None:
    deployment = Deployment(own_servers)
    async with deployment.store(append_timeout_s=4.0, flusher=False) as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        own_servers.nats.pause()
        with pytest.raises(OutcomeUnknown) as caught:
            await store.checkpoint(thread_id, [said(0), said(1)], run_of(thread_id))
        own_servers.nats.resume()

        async def retried() -> Any:
            try:
                return await store.checkpoint(
                    thread_id, [said(0), said(1)], run_of(thread_id), idempotency_key=caught.value.token
                )
            except (OutcomeUnknown, LogUnavailable):
                return None

        await eventually(retried)
        assert await store.load_messages(thread_id) == [said(0), said(1)]
        assert len(await store.buffer.log.after(store.buffer.subjects.of(thread_id), 0)) == 2


async def test_writes_whose_callers_gave_up_are_not_kept_until_nats_is_back(own_servers: Servers) -> None:
    """Regression: in an outage of NATS, each failed or cancelled write stayed in memory, with its payload."""
    deployment = Deployment(own_servers)
    async with deployment.store(append_timeout_s=8.0, flusher=False) as store:
        threads = [f"t-{number}" for number in range(50)]

        def write(thread_id: str) -> asyncio.Task[Receipt]:
            return asyncio.ensure_future(store.checkpoint_append(thread_id, [1], run_of(thread_id)))

        await asyncio.gather(*map(write, threads))
        lanes, writer = store.buffer.appender._lanes, store.buffer.log.writer
        assert isinstance(writer, Sequencer)
        own_servers.nats.pause()
        kept = [write(threads[0])]

        async def is_sent() -> bool:
            return bool(writer._sending)

        await eventually(is_sent)  # what is behind it waits
        for round_ in range(6):
            given_up = [write(thread_id) for thread_id in (threads if round_ % 2 else threads[:1] * 50)]
            for _ in range(3):
                await asyncio.sleep(0)
            for task in given_up:
                task.cancel()
            await asyncio.gather(*given_up, return_exceptions=True)
        kept.append(write(threads[0]))

        async def none_is_kept() -> bool:
            return not writer._waiting and [len(lane.queue) for lane in lanes.values() if lane.queue] == [1]

        await eventually(none_is_kept)
        own_servers.nats.resume()
        await asyncio.gather(*kept)
        assert await store.load_messages(threads[0]) == [1] * 3
        assert await store.load_messages(threads[1]) == [1]


@pytest.mark.long
async def test_no_nats_is_a_clear_error_in_time(own_servers: Servers) -> None:
    deployment = Deployment(own_servers)
    async with deployment.store(append_timeout_s=4.0, read_timeout_s=4.0) as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        await store.force_flush("t")
        own_servers.nats.stop()
        loop = asyncio.get_running_loop()
        for call in (
            store.checkpoint("t", [said(1)], run_of("t")),
            store.checkpoint("u", [said(1)], run_of("u")),
            store.load_messages("t"),
            store.force_flush("t"),
        ):
            began = loop.time()
            with pytest.raises((LogUnavailable, OutcomeUnknown, ReadNotFresh)):
                await call
            assert loop.time() - began < 10
        assert await store.load_messages("t", consistency=Consistency.EVENTUAL) == [said(0)]
        assert (await store.health()).log
        own_servers.nats.start()
        await eventually(lambda: _healthy(store))
        await store.checkpoint("t", [said(0), said(1)], run_of("t"))
        await store.force_flush("t", timeout_s=20)


async def _healthy(store: Any) -> bool:
    return bool((await store.health()).ok)


@pytest.mark.alone
async def test_a_full_log_pushes_back_and_drops_nothing(own_servers: Servers) -> None:
    deployment = Deployment(own_servers, max_bytes=1 << 20, failover_window_s=8.0)
    short = {"append_timeout_s": 4.0, "read_timeout_s": 4.0, "retain_after_flush_s": 8.0}
    async with deployment.store(**short) as store:
        own_servers.postgres.stop()
        thread_id, kept = fresh(), 0
        with pytest.raises(LogFull, match=r"holds \d+ of 1048576 bytes, about \d+ of them not flushed; slow down"):
            for n in range(200):
                await store.checkpoint_append(thread_id, [said(n, 20_000)], run_of(thread_id)) if n else (
                    await store.checkpoint(thread_id, [said(0, 20_000)], run_of(thread_id))
                )
                kept += 1
        assert kept > 30

        async def is_full() -> bool:
            health = await store.health()
            all_away = (health.can_write, health.can_read, health.flushing) == (False, False, False)
            return all_away and "full" in health.write_trouble

        await eventually(is_full)
        assert len(await store.load_messages(thread_id) or []) == kept
        own_servers.postgres.start()

        async def room() -> bool:
            try:
                await store.checkpoint_append(thread_id, ["more"], run_of(thread_id))
            except (LogFull, LogUnavailable, StoreUnavailable):
                return False
            return True

        await eventually(room, 60)
        await store.force_flush(thread_id)
        found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
        assert found == [*(said(n, 20_000) for n in range(kept)), "more"]


@pytest.mark.long  # many large entries
async def test_large_entries_that_do_not_fit_stop_nobody(own_servers: Servers) -> None:
    """The parts of such entries once filled the log until no group fitted, and were never purged."""
    deployment = Deployment(own_servers, max_bytes=8 << 20, failover_window_s=8.0)
    short = {"append_timeout_s": 4.0, "read_timeout_s": 4.0, "retain_after_flush_s": 8.0}
    async with deployment.store(**short) as store:
        stream, parts = store.buffer.session.stream, store.buffer.subjects.parts
        first, second = fresh(), fresh()
        await store.checkpoint(first, [said(0, 2 << 20)], run_of(first))
        await store.force_flush(first)
        used, _ = await stream.fill()
        with pytest.raises(LogFull, match="no room for a large entry"):
            await store.checkpoint(second, [said(0, 6 << 20)], run_of(second))
        assert (await stream.fill())[0] == used, "nothing of it was stored"
        with pytest.raises(TooLarge):
            await store.checkpoint(second, [said(0, 8 << 20)], run_of(second))
        # Leave as many parts as refused writers, or a killed process, could.
        with pytest.raises(LogFull):
            while True:
                await stream.publish(Outgoing(parts, b"x" * 1_000_000), 5)

        async def written() -> bool:
            """Stored in parts, too; no small write happens that would fit."""
            try:
                await store.checkpoint(second, [said(0, 5 << 20)], run_of(second))
            except (LogFull, LogUnavailable):
                return False
            return True

        assert not await written()
        await eventually(written, 90)
        await store.force_flush_all()
        assert await store.load_messages(first) == [said(0, 2 << 20)]
        assert await store.load_messages(second) == [said(0, 5 << 20)]
        assert not (await store.verify()).findings
    async with deployment.store(**short) as store:
        assert await store.load_messages(second) == [said(0, 5 << 20)]


async def test_cancelling_at_any_moment_leaves_everything_usable(own_servers: Servers) -> None:
    deployment = Deployment(own_servers)
    chance = random.Random(7)
    before = _tasks()
    async with deployment.store() as store:
        thread_ids = [fresh() for _ in range(10)]
        for round_ in range(60):
            calls: list[asyncio.Task[Any]] = []
            for t in thread_ids:
                calls += [
                    asyncio.create_task(store.checkpoint_append(t, [round_], run_of(t, round_))),
                    asyncio.create_task(store.load_checkpoint(t)),
                    asyncio.create_task(store.force_flush(t)),
                ]
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            unexpected = [o for o in outcomes if isinstance(o, Exception)]
            assert not unexpected
        for t in thread_ids:
            await store.checkpoint_append(t, ["end"], run_of(t))
            found = await store.load_messages(t)
            assert found is not None
            numbers = found[:-1]
            assert found[-1] == "end"
            assert numbers == sorted(set(numbers))
        await store.force_flush_all()
        pools = store._store.pool, store.buffer.ledger._tables.pool  # type: ignore[attr-defined]
        await eventually(lambda: _all_back(*pools))
        await store.aclose()
        await eventually(lambda: _ended(before))


async def _all_back(*pools: Any) -> bool:
    return all(p.get_stats()["pool_available"] == p.get_stats()["pool_size"] for p in pools)


async def _ended(before: set[asyncio.Task[Any]]) -> bool:
    return _tasks() <= before


def _tasks() -> set[asyncio.Task[Any]]:
    """Return the tasks that run code of bufstore."""
    ours = str(Path(bufstore.__file__).parent)
    return {
        t for t in asyncio.all_tasks() if getattr(t.get_coro(), "cr_code", _tasks.__code__).co_filename.startswith(ours)
    }


async def test_what_others_append_between_two_looks_into_the_log_is_built_upon(own_servers: Servers) -> None:
    """Right after an outage of Postgres a writer reads the end, then the tail, then the row: these must agree."""
    deployment = Deployment(own_servers)
    async with deployment.store() as one, deployment.store(flusher=False) as two:
        thread_id, overtaken = fresh(), False
        ends = two.buffer.log.ends

        async def overtaken_behind_the_end(subjects: Sequence[str]) -> list[int]:
            nonlocal overtaken
            found = await ends(subjects)
            if not overtaken:
                assert found == [0]
                overtaken = True
                await one.checkpoint_append(thread_id, ["one"], run_of(thread_id))
            return found

        two.buffer.log.ends = overtaken_behind_the_end  # type: ignore[method-assign]
        two.buffer.reads.store.down = "the test says so"
        await two.checkpoint_append(thread_id, ["two"], run_of(thread_id))
        assert overtaken
        await one.force_flush(thread_id)
        assert await one.quarantined() == 0
        assert await one.load_messages(thread_id, consistency=Consistency.EVENTUAL) == ["one", "two"]


async def test_force_flush_ends_under_steady_writes_and_covers_what_was_there_when_it_was_called(
    deployment: Deployment,
) -> None:
    async with deployment.store(flush_interval_s=0.2) as store:
        thread_id, stop = fresh(), asyncio.Event()
        acknowledged = 0

        async def write() -> None:
            nonlocal acknowledged
            while not stop.is_set():
                await store.checkpoint_append(thread_id, [acknowledged], run_of(thread_id))
                acknowledged += 1

        writing = asyncio.create_task(write())
        try:
            for call in (lambda: store.force_flush(thread_id), store.force_flush_all) * 5:
                await eventually(lambda before=acknowledged: _reached(lambda: acknowledged, before + 5))
                before = acknowledged
                await call()
                found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
                assert found is not None
                assert found == list(range(len(found)))
                assert len(found) >= before
        finally:
            stop.set()
            await writing


async def test_what_anybody_sends_to_our_inboxes_ends_no_connection(deployment: Deployment) -> None:
    async with deployment.store() as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await store.force_flush_all()
        connection = store.buffer.session.connection  # type: ignore[attr-defined]
        client = connection.client()
        assert store.buffer.flusher is not None
        log = store.buffer.log
        groups = log._feeds._common._groups  # type: ignore[attr-defined]
        stranger = await nats.connect(deployment.servers.nats.url)
        try:
            for inbox in (f"{connection._inbox}.1", groups._inbox):  # type: ignore[attr-defined]
                for reply in ("", "a.b", "a.b.c.d.e.f.g.h.i"):
                    await stranger.publish(inbox, b"\xff{", reply=reply, headers={"Nats-Sequence": "x"})
            await stranger.flush()
        finally:
            await stranger.close()
        for n in range(1, 30):
            await store.checkpoint_append(thread_id, [said(n)], run_of(thread_id))
        await store.force_flush_all()
        assert await store.load_messages(thread_id) == [said(n) for n in range(30)]
        assert connection.client() is client


@pytest.mark.parametrize("level", [Consistency.READ_YOUR_WRITES, Consistency.STRONG])
async def test_reads_outlive_a_restart_of_nats(own_servers: Servers, level: Consistency) -> None:
    deployment = Deployment(own_servers)
    async with deployment.store(read_timeout_s=25) as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        reads = 0

        async def read() -> None:
            nonlocal reads
            while True:
                assert await store.load_messages(thread_id, consistency=level) == [said(0)]
                reads += 1
                await asyncio.sleep(0)

        async def read_more() -> None:
            last = reads + 10
            while reads <= last:
                await asyncio.sleep(0.01)
                for task in reading:
                    if task.done():
                        task.result()

        reading = [asyncio.create_task(read()) for _ in range(4)]
        try:
            await read_more()
            await asyncio.to_thread(own_servers.nats.stop)
            await asyncio.to_thread(own_servers.nats.start)
            await read_more()
        finally:
            await end(*reading)
