"""The cost of an operation does not grow with the data, and nothing in NATS grows without bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bufstore import AlreadyExists, BufferConfig, BufferedThreadStore, Consistency, RunQuery, RunStatus, ThreadQuery
from bufstore.nats.feed import NatsFeed
from bufstore.threads.model import encode_run
from conftest import Deployment
from helpers import done, eventually, fresh, query, run_of, said


async def _bucket(store: BufferedThreadStore, deployment: Deployment) -> dict[str, Any]:
    info = await store.buffer.session.stream.api(f"STREAM.INFO.KV_{deployment.log.bucket}")
    return dict(info["state"])


async def _sent(store: BufferedThreadStore) -> int:
    return store.buffer.session.traffic[0]


async def test_the_hot_bucket_grows_with_runs_and_not_with_checkpoints(deployment: Deployment) -> None:
    threads = [fresh() for _ in range(10)]
    async with deployment.store() as store:

        async def talk(thread_id: str, steps: int) -> None:
            for n in range(steps):
                await store.checkpoint_append(thread_id, [said(n)], run_of(thread_id))
                if n % 10 == 0:
                    await store.force_flush(thread_id)

        await asyncio.gather(*(talk(t, 1) for t in threads))
        await store.force_flush_all()
        before = await _bucket(store, deployment)
        for t in threads:
            await store.delete_messages(t)
        await asyncio.gather(*(talk(t, 40) for t in threads))
        await store.force_flush_all()
        after = await _bucket(store, deployment)
        # A key per run, a progress record per partition, a record per member, and nothing per checkpoint.
        assert before["messages"] <= after["messages"] <= len(threads) + deployment.log.partitions + 1


async def test_going_on_with_the_runs_of_a_process_that_ended_claims_none_of_them_again(deployment: Deployment) -> None:
    threads = [fresh() for _ in range(100)]
    async with deployment.store() as first:
        await asyncio.gather(*(first.checkpoint(t, [said(0)], run_of(t)) for t in threads))
    async with deployment.store(flusher=False) as store:
        await store.checkpoint_append(threads[0], [said(1)], run_of(threads[0]))
        before = await _sent(store)
        await asyncio.gather(*(store.checkpoint_append(t, [said(1)], run_of(t)) for t in threads[1:]))
        assert await _sent(store) - before < len(threads) / 2
        # A new run is still claimed, and a run of another thread is refused.
        await store.checkpoint_append(threads[0], [said(2)], run_of(threads[0], 1))
        assert (await store.load_run(run_of(threads[0], 1).run_id)) is not None
        taken = msgspec.structs.replace(run_of(threads[2]), thread_id=threads[1])
        with pytest.raises(AlreadyExists, match="another thread"):
            await store.checkpoint_append(threads[1], [said(3)], taken)


async def test_runs_are_claimed_while_the_bucket_is_missing_of_which_some_were_known(deployment: Deployment) -> None:
    a, b = fresh(), fresh()
    async with deployment.store() as first:
        await first.checkpoint(a, [said(0)], run_of(a))
    async with deployment.store() as store:
        await store.checkpoint_append(a, [said(1)], run_of(a))  # meets a run that is already claimed
        await store.buffer.session.stream.api(f"STREAM.DELETE.KV_{deployment.log.bucket}")
        await store.checkpoint(b, [said(0)], run_of(b))
        assert (await _bucket(store, deployment))["messages"] > 0


async def test_a_flush_writes_one_record_for_each_partition_and_none_for_a_thread(deployment: Deployment) -> None:
    threads = [fresh() for _ in range(200)]
    async with deployment.store(flusher=False) as writer:
        await asyncio.gather(*(writer.checkpoint(t, [said(0)], run_of(t)) for t in threads))
        before = (await _bucket(writer, deployment))["last_seq"]
        async with deployment.store() as flusher:
            await flusher.force_flush_all()
            state = (await flusher.statistics()).flusher

            async def counted() -> bool:
                return state.entries == len(threads)

            await eventually(counted)
            written = (await _bucket(writer, deployment))["last_seq"] - before
        # The rest are renewals of the lease.
        assert written <= state.transactions * deployment.log.partitions + 20
        assert written < len(threads) / 2


async def test_a_flush_of_a_known_thread_touches_no_index_of_the_buffer(deployment: Deployment) -> None:
    """Watermarks and cursors are updated in place: see 0004_updates_in_place.sql."""
    thread_id, flushes = fresh(), 20
    async with deployment.store() as store:
        for n in range(flushes):
            await store.checkpoint_append(thread_id, [said(n)], run_of(thread_id))
            await store.force_flush(thread_id)
    dsn = deployment.servers.postgres.dsn
    updates = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE schemaname = %s AND relname = %s"

    async def counted(table: str) -> list[tuple[int, int]]:
        # Postgres reports a session's statistics only some time after the session has ended.
        return [row for row in await query(dsn, updates, deployment.name, table) if row[0] >= flushes]

    for table in ("buffer_threads", "buffer_partitions"):
        ((all_, in_place),) = await eventually(lambda table=table: counted(table))  # type: ignore[misc]
        assert in_place >= 0.9 * all_, table


async def test_the_thousandth_checkpoint_costs_what_the_first_did(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        threads = [fresh() for _ in range(50)]
        for t in threads:
            await store.checkpoint(t, [], run_of(t))

        async def cost(n: int) -> int:
            before = await _sent(store)
            for t in threads:
                await store.checkpoint(t, [n], run_of(t))
            return await _sent(store) - before

        costs = [await cost(n) for n in range(20)]
        assert set(costs) == {len(threads)}


async def test_a_list_costs_the_same_however_many_threads_there_are(deployment: Deployment) -> None:
    async with deployment.store(flush_interval_s=600, lease_s=8) as store:
        prefix = fresh()

        async def cost() -> tuple[int, int]:
            pools = (store._store.pool, store.buffer.ledger._tables.pool)  # type: ignore[attr-defined]

            def requests() -> int:
                return sum(pool.get_stats()["requests_num"] for pool in pools)

            await store.force_flush_all()
            before, asked = await _sent(store), requests()
            for consistency in (Consistency.READ_YOUR_WRITES, Consistency.EVENTUAL):
                threads = await store.query_threads(ThreadQuery(id_prefix=prefix), limit=5, consistency=consistency)
                runs = await store.query_runs(
                    RunQuery(id_prefix="run-0-of-" + prefix), limit=5, consistency=consistency
                )
                assert len(threads.threads) == len(runs.runs) == 5
            return await _sent(store) - before, requests() - asked

        async def grow(count: int) -> None:
            ids = [f"{prefix}-{fresh()}" for _ in range(count)]
            await asyncio.gather(*(store.checkpoint(t, [said(0)], run_of(t)) for t in ids))

        await grow(10)
        few = await cost()
        await grow(500)
        many = await cost()
        # Renewals of the lease and windows of the flusher are counted as well.
        assert many[0] <= few[0] + 30
        assert many[1] <= few[1] + 10


async def test_a_flushed_run_is_read_from_the_store_and_from_no_copy(deployment: Deployment) -> None:
    async with deployment.store() as store:
        thread_id = fresh()
        run = run_of(thread_id)
        await store.checkpoint(thread_id, [said(0)], run)
        await store.force_flush(thread_id)
        other = run_of(thread_id, steps=7)
        await query(
            deployment.servers.postgres.dsn,
            f"UPDATE {deployment.name}.runs SET record = %s WHERE run_id = %s",
            encode_run(other),
            run.run_id,
        )
        for level in Consistency:
            assert await store.load_run(run.run_id, consistency=level) == other
        assert await store.latest_run(thread_id) == other


async def test_every_run_ends_as_it_was_saved_last_whoever_flushes_it(deployment: Deployment) -> None:
    """Runs of many threads are saved in turn through two instances, while partitions move between three."""
    threads = [fresh() for _ in range(20)]
    async with deployment.store() as one, deployment.store() as two:

        async def talk(thread_id: str) -> None:
            for step in range(8):
                for n in range(3):
                    run = run_of(thread_id, n)
                    store = (one, two)[(step + n) % 2]
                    if step < 3 * n + 2:
                        run = done(run) if step == 3 * n + 1 else run
                        await store.checkpoint_append(thread_id, [step], run)

        talking = asyncio.gather(*map(talk, threads))
        async with deployment.store():
            await talking
        await one.force_flush_all()
        for status, expected in ((RunStatus.RUNNING, 0), (RunStatus.DONE, 3)):
            for t in threads:
                page = await two.query_runs(RunQuery(thread_id=t, status=status))
                assert len(page.runs) == expected
        for t in threads:
            thread = await two.load_thread(t, consistency=Consistency.EVENTUAL)
            assert thread is not None
            assert (thread.active_run_id, thread.open_run_id) == (None, None)


async def test_a_hot_thread_is_flushed_in_parts_of_bounded_size(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread_id, size = fresh(), 256 << 10
    async with deployment.store(flusher=False) as writer:
        for n in range(80):
            await writer.checkpoint_append(thread_id, [said(n, size)], run_of(thread_id))
    held: list[int] = []
    take = NatsFeed.take

    def watched(feed: NatsFeed) -> Any:
        held.append(feed._held_bytes)
        return take(feed)

    monkeypatch.setattr(NatsFeed, "take", watched)
    async with deployment.store(flush_max_bytes=1 << 20) as store:
        await store.force_flush_all()
        state = (await store.statistics()).flusher
        assert max(held) <= 2 * (2 << 20), "a request more than the bound of one partition, of 20 MiB"
        assert state.transactions >= 4
        assert await store.load_messages(thread_id) == [said(n, size) for n in range(80)]


@pytest.mark.parametrize("flush_max_bytes", [BufferConfig().flush_max_bytes, 1 << 30])
async def test_what_a_flusher_asks_for_at_once_does_not_make_it_a_slow_consumer(
    deployment: Deployment, flush_max_bytes: int
) -> None:
    server_holds = 64 << 20  # max_pending: nats-server disconnects a client for which it queues more than this
    async with deployment.store(flush_max_bytes=flush_max_bytes) as store:
        flusher = store.buffer.flusher
        assert flusher is not None

        async def complete() -> bool:
            return len(flusher._owned) == deployment.log.partitions

        await eventually(complete)
        groups = store.buffer.log._feeds._common._groups  # type: ignore[attr-defined]
        assert groups._sizes.bytes_max <= server_holds / 2


async def test_nothing_in_the_log_ages_or_is_pushed_out(deployment: Deployment) -> None:
    async with deployment.store() as store:
        config = (await store.buffer.session.stream.api(f"STREAM.INFO.{deployment.log.stream}"))["config"]
        assert (config["retention"], config["max_age"], config["discard"]) == ("limits", 0, "new")
        assert (config["max_msgs"], config["max_msgs_per_subject"]) == (-1, -1)
        assert config["max_bytes"] == deployment.log.max_bytes
        assert config["storage"] == "file"


async def test_two_deployments_on_one_server_do_not_meet(
    deployment: Deployment, deploy: Callable[..., Deployment]
) -> None:
    other = deploy()
    thread_id = fresh()
    async with deployment.store() as one, other.store() as two:
        for n, store in enumerate((one, two)):
            assert await store.load_thread(thread_id) is None
            await store.checkpoint(thread_id, [said(n)], run_of(thread_id, steps=n))
        for n, store in enumerate((one, two)):
            await store.force_flush_all()
            assert await store.load_messages(thread_id) == [said(n)]
            assert await store.load_run(run_of(thread_id).run_id) == run_of(thread_id, steps=n)
            assert len((await store.query_threads()).threads) == 1

            async def alone(state: Any = store.buffer.flusher.state) -> bool:  # type: ignore[union-attr]
                return len(state.partitions) == deployment.log.partitions

            await eventually(alone)
