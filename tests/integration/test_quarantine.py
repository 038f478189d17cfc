"""The quarantine on real servers: parking, replay, discard, its limit, and a storm of poison."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from bufstore import (
    AlreadyExists,
    Consistency,
    InvalidId,
    MemoryThreadStore,
    NotFound,
    PostgresThreadStore,
    RunQuery,
    ThreadQuarantined,
    ThreadQuery,
)
from bufstore.buffer.entry import Malformed, StoredEntry
from bufstore.buffer.operate.replay import Outcome
from bufstore.jetstream.messages import Outgoing
from conftest import Deployment
from helpers import eventually, fresh, query, run_of, said
from hostile import publish_raw


class Picky(PostgresThreadStore):
    """Refuses messages with a mark, as a table's constraint would, until `mended` is set."""

    mended = False

    async def apply(self, connection: Any, batch: Any) -> None:
        if not self.mended and any(b"poison" in m for c in batch for m in c.messages):
            await connection.execute("SELECT 1/0")
        await super().apply(connection, batch)


class PickyMemory(MemoryThreadStore):
    """The same store in memory, whose errors are an app's own."""

    mended = False

    async def apply(self, connection: Any, batch: Any) -> None:
        if not self.mended and any(b"poison" in m for c in batch for m in c.messages):
            raise AlreadyExists("refused")
        await super().apply(connection, batch)


class Own:
    """An app's store with the two reads and `apply`, in tables unknown to bufstore."""

    def __init__(self, tables: Picky) -> None:
        self.apply = tables.apply
        self.load_checkpoint = tables.load_checkpoint
        self.load_run = tables.load_run


def picky(deployment: Deployment) -> Picky:
    return Picky(deployment.servers.postgres.dsn, schema=deployment.name, pool_size=4)


def results(done: Any) -> list[str]:
    return [o.outcome.value for o in done]


async def row_of(deployment: Deployment, thread_id: str) -> tuple[Any, ...]:
    sql = f"SELECT applied_id, version, broken_since FROM {deployment.name}.buffer_threads WHERE thread_id = %s"
    return (await query(deployment.servers.postgres.dsn, sql, thread_id))[0]


async def poisoned(store: Any, thread_id: str, behind: int = 2) -> list[Any]:
    """Write a good entry, one that the store refuses, and some that build on it; return the thread's messages."""
    messages: list[Any] = [said(0)]
    await store.checkpoint(thread_id, messages, run_of(thread_id))
    messages.append({"content": "poison", "id": "p"})
    await store.checkpoint(thread_id, messages, run_of(thread_id, 1))
    for n in range(behind):
        messages.append(said(n + 1))
        await store.checkpoint_append(thread_id, messages[-1:], run_of(thread_id, 2 + n))
    await store.force_flush(thread_id)
    return messages


@pytest.mark.parametrize("kind", ["postgres", "memory"])
async def test_what_was_parked_is_replayed_in_order_and_once(deployment: Deployment, kind: str) -> None:
    inner: Any = picky(deployment) if kind == "postgres" else PickyMemory()
    async with deployment.store(inner, flush_interval_s=600) as store:
        thread_id = fresh()
        messages = await poisoned(store, thread_id)
        page = await store.quarantine.page()
        assert [p.thread_id for p in page] == [thread_id] * 3
        assert not any(p.superseded for p in page)
        assert kind == "memory" or "division by zero" in page[0].cause
        first = await store.quarantine.show(page[0].seq)
        assert isinstance(first.item, StoredEntry)
        assert b"poison" in first.item.entry.payload
        for read in (store.load_checkpoint, store.load_messages, store.load_thread, store.latest_run):
            with pytest.raises(ThreadQuarantined):
                await read(thread_id)
            with pytest.raises(ThreadQuarantined):
                await read(thread_id, consistency=Consistency.STRONG)
        for level in Consistency:
            assert await store.load_messages(thread_id, consistency=level, quarantined="known") == [said(0)]
        run = run_of(thread_id)
        assert await store.load_run(run.run_id, quarantined="known") == run

        still = await store.quarantine.replay_thread(thread_id)
        assert results(still) == ["refused", "waits", "waits"]
        assert kind == "memory" or "division by zero" in still[0].reason
        assert results(await store.quarantine.replay(page[1].seq)) == ["waits", "waits"]
        assert await store.quarantined() == 3

        inner.mended = True
        done = await store.quarantine.replay(page[0].seq)
        assert [(o.seq, o.outcome) for o in done] == [(p.seq, Outcome.APPLIED) for p in page]
        assert await store.load_messages(thread_id) == messages
        assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == messages
        assert await store.latest_run(thread_id) == run_of(thread_id, 3)
        assert await store.quarantined() == 0
        assert await store.quarantine.replay_thread(thread_id) == []
        with pytest.raises(NotFound):
            await store.quarantine.replay(page[0].seq)
        await store.checkpoint_append(thread_id, [said(9)], run_of(thread_id), expected_version=len(messages))
        await store.force_flush(thread_id)
        assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [*messages, said(9)]


async def test_an_apps_own_store_gets_what_is_replayed(deployment: Deployment) -> None:
    dsn = deployment.servers.postgres.dsn
    async with Picky(dsn, schema=f"{deployment.name}_own", pool_size=2) as tables:
        await tables.setup()
        async with deployment.store(Own(tables), postgres=dsn, schema=deployment.name, flush_interval_s=600) as store:
            thread_id = fresh()
            messages = await poisoned(store, thread_id)
            assert results(await store.quarantine.replay_thread(thread_id)) == ["refused", "waits", "waits"]
            tables.mended = True
            assert results(await store.quarantine.replay_thread(thread_id)) == ["applied"] * 3
            assert await tables.load_messages(thread_id) == messages
            assert await store.load_messages(thread_id) == messages


async def test_pages_of_a_store_without_queries_are_marked_too(deployment: Deployment) -> None:
    dsn = deployment.servers.postgres.dsn
    async with Picky(dsn, schema=f"{deployment.name}_own", pool_size=2) as tables:
        await tables.setup()
        async with deployment.store(Own(tables), postgres=dsn, schema=deployment.name) as store:
            bad = fresh()
            await poisoned(store, bad)
            for level in Consistency:
                page = await store.query_messages(bad, consistency=level)
                assert ([r.message for r in page.records], page.quarantined) == ([said(0)], {bad})
            with pytest.raises(ThreadQuarantined):
                await store.load_message(bad, "m0")
            await store.checkpoint(bad, [said(1)], run_of(bad))
            page = await store.query_messages(bad)
            assert ([r.message for r in page.records], page.quarantined) == ([said(1)], frozenset())


@pytest.mark.parametrize("kind", ["postgres", "memory"])
async def test_lists_show_what_is_flushed_of_a_thread_in_quarantine_and_mark_it(
    deployment: Deployment, kind: str
) -> None:
    inner: Any = picky(deployment) if kind == "postgres" else PickyMemory()
    async with deployment.store(inner, flush_interval_s=600) as store:
        prefix = fresh()
        bad, good = f"{prefix}-bad", f"{prefix}-good"
        await store.checkpoint(good, [said(5)], run_of(good))
        await poisoned(store, bad)
        both, alone = ThreadQuery(id_prefix=prefix), ThreadQuery(id_prefix=good)
        for level in Consistency:
            threads = await store.query_threads(both, consistency=level)
            assert {t.thread_id: t.version for t in threads.threads} == {bad: 1, good: 1}
            assert threads.quarantined == {bad}
            assert (await store.query_threads(alone, consistency=level)).quarantined == frozenset()
            messages = await store.query_messages(bad, consistency=level)
            assert ([r.message for r in messages.records], messages.quarantined) == ([said(0)], {bad})
            assert (await store.query_messages(good, consistency=level)).quarantined == frozenset()
            runs = await store.query_runs(RunQuery(id_prefix="run-0-of-" + prefix), consistency=level)
            assert {r.thread_id for r in runs.runs} == {bad, good}
            assert runs.quarantined == {bad}
            runs = await store.query_runs(RunQuery(thread_id=bad), consistency=level)
            assert (runs.runs, runs.quarantined) == ([run_of(bad)], {bad})
            assert (await store.query_runs(RunQuery(thread_id=good), consistency=level)).quarantined == frozenset()
        pages = [await store.query_threads(both, limit=1)]
        pages.append(await store.query_threads(both, limit=1, cursor=pages[0].next_cursor))
        assert [page.quarantined == {page.threads[0].thread_id} for page in pages].count(True) == 1
        for call in (store.load_message(bad, "m0"), store.load_message_range(bad, 1, 9)):
            with pytest.raises(ThreadQuarantined):
                await call
        found = await store.load_message(bad, "m0", consistency=Consistency.EVENTUAL)
        assert found is not None
        assert len(await store.load_message_range(bad, 1, 9, consistency=Consistency.EVENTUAL)) == 1
        await store.checkpoint(bad, [said(7)], run_of(bad))
        assert (await store.query_threads(both)).quarantined == frozenset()
        messages = await store.query_messages(bad)
        assert ([r.message for r in messages.records], messages.quarantined) == ([said(7)], frozenset())
        assert [r.message for r in await store.load_message_range(bad, 1, 9)] == [said(7)]


async def test_a_thread_of_which_nothing_could_be_applied_is_marked_too(deployment: Deployment) -> None:
    async with deployment.store(picky(deployment)) as store:
        bad = fresh()
        await store.checkpoint(bad, [{"content": "poison"}], run_of(bad))
        page = await store.query_messages(bad)
        assert (page.records, page.quarantined) == ([], {bad})
        runs = await store.query_runs(RunQuery(thread_id=bad))
        assert (runs.runs, runs.quarantined) == ([], {bad})


async def test_poison_delays_no_list_no_deletion_and_no_end(deployment: Deployment) -> None:
    async with deployment.store(picky(deployment), flush_timeout_s=30) as store:
        bad, good = fresh(), fresh()
        await store.checkpoint(good, [said(0)], run_of(good))
        await poisoned(store, bad)
        async with asyncio.timeout(25):
            assert good in {t.thread_id for t in (await store.query_threads()).threads}
            assert good in {r.thread_id for r in (await store.query_runs()).runs}
            await store.force_flush_all()
            await store.force_flush(bad)
            await store.delete_thread(good)
            await store.delete_thread(bad)
            assert {t.thread_id for t in (await store.query_threads()).threads}.isdisjoint({good, bad})
            await store.aclose()


async def test_a_thread_that_was_healed_is_not_touched_by_a_replay(deployment: Deployment) -> None:
    inner = picky(deployment)
    async with deployment.store(inner, flush_interval_s=600) as store:
        thread_id = fresh()
        await poisoned(store, thread_id)
        await store.checkpoint(thread_id, [said(7)], run_of(thread_id))
        await store.force_flush(thread_id)
        inner.mended = True
        assert all(p.superseded for p in await store.quarantine.page(thread_id=thread_id))
        done = await store.quarantine.replay_thread(thread_id)
        assert results(done) == ["superseded"] * 3
        assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == [said(7)]
        assert await store.load_run(run_of(thread_id, 1).run_id) is None
        assert await store.quarantine.discard([o.seq for o in done]) == 3
        assert await store.quarantined() == 0
        assert await store.load_messages(thread_id) == [said(7)]


async def test_equal_garbage_is_kept_each_time_it_comes(deployment: Deployment) -> None:
    async with deployment.store() as store:
        threads = [fresh(), fresh()]
        for n in range(6):
            await store.buffer.log.publish(Outgoing(store.buffer.subjects.of(threads[n % 2]), b"garbage"), 5)
        await store.force_flush_all()
        page = await store.quarantine.page()
        assert [p.thread_id for p in page] == threads * 3
        assert len({p.seq for p in page}) == 6
        assert len({p.hash for p in page}) == 6, "of where it stood, too"
        lag = await store.lag()
        assert set(lag.values()) == {0}, "nothing of it comes again"


async def test_poison_is_parked_without_the_hot_bucket(deployment: Deployment) -> None:
    deployment.verified = False
    async with deployment.store(picky(deployment)) as store:
        bad, good = fresh(), fresh()
        await store.checkpoint(bad, [said(0)], run_of(bad))
        await store.checkpoint(good, [said(0)], run_of(good))
        await store.buffer.session.stream.api(f"STREAM.DELETE.KV_{deployment.log.bucket}")
        await store.checkpoint_append(bad, [{"content": "poison"}], run_of(bad))
        await store.checkpoint_append(good, [said(1)], run_of(good))
        await store.force_flush_all()
        assert [p.thread_id for p in await store.quarantine.page()] == [bad]
        assert set((await store.lag()).values()) == {0}
        assert await store.load_messages(good, consistency=Consistency.EVENTUAL) == [said(0), said(1)]
        with pytest.raises(ThreadQuarantined):
            await store.load_messages(bad)


async def test_what_cannot_be_decoded_says_why_and_ends_a_replay_there(deployment: Deployment) -> None:
    inner = picky(deployment)
    async with deployment.store(inner, flush_interval_s=600) as store:
        thread_id = fresh()
        await poisoned(store, thread_id, behind=0)
        await store.buffer.log.publish(Outgoing(store.buffer.subjects.of(thread_id), b"garbage"), 5)
        await store.buffer.session.connection.request(store.buffer.subjects.groups, b"nor this", 5)
        # An undecodable group counts as partition 0's, so a flush of a later entry of partition 0 meets it.
        behind = next(t for t in (f"behind-{n}" for n in range(1000)) if store.buffer.subjects.partition(t) == 0)
        await store.checkpoint(behind, [said(0)], run_of(behind))
        await store.force_flush_all()
        page = await store.quarantine.page()
        assert [p.thread_id for p in page] == [thread_id, thread_id, None]
        garbage = (await store.quarantine.show(page[1].seq)).item
        assert isinstance(garbage, Malformed)
        assert garbage.messages[0].body == b"garbage"
        inner.mended = True
        done = await store.quarantine.replay_thread(thread_id)
        assert results(done) == ["applied", "undecodable"]
        assert "header" in done[1].reason
        assert results(await store.quarantine.replay(page[2].seq)) == ["undecodable"]
        assert (await row_of(deployment, thread_id))[2] == page[1].seq, "broken from there on"
        known = await store.load_messages(thread_id, quarantined="known")
        assert known == [said(0), {"content": "poison", "id": "p"}]
        assert await store.quarantine.discard([p.seq for p in page]) == 2
        assert (await row_of(deployment, thread_id))[2] is None
        assert await store.load_messages(thread_id) == known
        await store.checkpoint(thread_id, [*known, said(1)], run_of(thread_id))
        await store.force_flush(thread_id)
        assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [*known, said(1)]


async def test_replays_at_once_beside_writers_and_a_flusher_apply_each_entry_once(deployment: Deployment) -> None:
    inner = picky(deployment)
    async with (
        deployment.store(inner, flush_interval_s=600) as store,
        deployment.store(picky(deployment), flusher=False) as other,
    ):
        threads = [fresh() for _ in range(10)]
        expected: dict[str, list[Any]] = {}
        for thread_id in threads:
            expected[thread_id] = await poisoned(store, thread_id, behind=3)
        other._store.mended = inner.mended = True  # type: ignore[attr-defined]
        stop = asyncio.Event()

        async def write() -> None:
            while not stop.is_set():
                for n in range(3):
                    busy = f"busy-{n}-{deployment.name}"
                    await store.checkpoint_append(busy, [{"n": 1}], run_of(busy))
                await asyncio.sleep(0.005)

        async def replay(quarantine: Any) -> Counter[str]:
            found: Counter[str] = Counter()
            for thread_id in random.Random(1).sample(threads, len(threads)):
                found.update(results(await quarantine.replay_thread(thread_id)))
            return found

        writing = asyncio.create_task(write())
        counts = await asyncio.gather(*(replay(q) for q in [store.quarantine, other.quarantine] * 3))
        stop.set()
        await writing
        parked = sum(c["applied"] for c in counts)
        assert sum(len(m) for m in expected.values()) - 10 >= parked > 0
        for thread_id, messages in expected.items():
            assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == messages
            assert (await row_of(deployment, thread_id))[1:] == (len(messages), None)
        assert await store.quarantined() == 0


async def test_with_a_full_quarantine_poison_waits_and_nothing_is_dropped(deployment: Deployment) -> None:
    inner = picky(deployment)
    async with deployment.store(inner, quarantine_max=2) as store:
        bad, good = [fresh("bad") for _ in range(5)], [fresh("good") for _ in range(20)]
        for thread_id in [*bad, *good]:
            content = {"content": "poison"} if thread_id in bad else said(0)
            await store.checkpoint(thread_id, [content], run_of(thread_id))
        await publish_raw(store, None, b"no entry")
        for thread_id in good:
            await store.force_flush(thread_id)

        async def trouble() -> str:
            return (await store.health()).flusher

        async def full() -> bool:
            return "quarantine is full" in await trouble()

        await eventually(full)
        assert await store.quarantined() == 2
        await store.checkpoint(good[0], [said(1)], run_of(good[0]))
        await store.force_flush(good[0])
        page = await store.quarantine.page()
        assert await store.quarantine.discard([p.seq for p in page]) == 2
        # With room again, waiting entries are parked until it is full, within the longest pause.

        async def full_again() -> bool:
            return await store.quarantined() == 2

        await eventually(full_again)
        inner.mended = True  # entries that are not parked yet are applied, or parked when there is room
        while page := await store.quarantine.page():
            await store.quarantine.discard([p.seq for p in page])
            await asyncio.sleep(0.3)
        await store.force_flush_all(timeout_s=20)
        while page := await store.quarantine.page():
            await store.quarantine.discard([p.seq for p in page])

        async def calm() -> bool:
            return not await trouble()

        await eventually(calm)


@pytest.mark.long
async def test_a_storm_of_poison_delays_the_good_by_little(deployment: Deployment) -> None:
    chance = random.Random(7)
    inner = picky(deployment)
    good, bad = 10_000, 1_000
    async with deployment.store(flusher=False) as writer:
        threads = [fresh() for _ in range(2_000)]
        # Two thirds of the poison are refused by the database, one third cannot be decoded; each ends its thread.
        kinds = chance.sample(threads, bad)
        garbage = set(kinds[: bad // 3])
        refused = set(kinds[bad // 3 :])

        async def talk(thread_id: str, steps: int) -> None:
            for n in range(1, steps + 1):
                await writer.checkpoint(thread_id, [said(i) for i in range(n)], run_of(thread_id))
            if thread_id in refused:
                await writer.checkpoint_append(thread_id, [{"content": "poison"}], run_of(thread_id))
            elif thread_id in garbage:
                await writer.buffer.log.publish(Outgoing(writer.buffer.subjects.of(thread_id), b"garbage"), 10)

        for i in range(0, len(threads), 500):
            await asyncio.gather(*(talk(t, good // len(threads)) for t in threads[i : i + 500]))
    async with deployment.store(inner) as store:
        await store.force_flush_all(timeout_s=120)
        assert await store.quarantined() == bad
        sql = f"SELECT count(*), sum(version), count(broken_since) FROM {deployment.name}.buffer_threads"
        assert await query(deployment.servers.postgres.dsn, sql) == [(len(threads), good, bad)]
        causes = Counter(p.cause for p in await store.quarantine.page(limit=2_000))
        assert len(causes) == 2
        # 16 on an idle machine, because entries are blamed inside the windows' transactions.
        assert (await store.statistics()).flusher.transactions < 60


async def test_a_list_of_what_cannot_be_asked_is_refused_or_as_short_as_it_may_be(deployment: Deployment) -> None:
    """Postgres once refused such a list with an error of the driver."""
    async with deployment.store() as store:
        assert list(await store.quarantine.threads(limit=-1)) == list(await store.quarantine.threads(limit=2**70)) == []
        wrong: Any
        for wrong in ("\0", "\ud800", 7, None):
            with pytest.raises(InvalidId):
                await store.quarantine.threads(after=wrong)
