"""The whole path on real servers: append, flush, read, force_flush."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from bufstore import (
    AlreadyExists,
    BlockingBufferedStore,
    BufferedThreadStore,
    BufstoreError,
    Consistency,
    FlushTimeout,
    IdempotencyConflict,
    MemoryThreadStore,
    PostgresThreadStore,
    ReadNotFresh,
    StoreUnavailable,
    ThreadQuarantined,
    TooLarge,
    Unavailable,
    VersionConflict,
)
from bufstore.embedded import Servers
from bufstore.jetstream import frames
from bufstore.jetstream.messages import Outgoing
from bufstore.jetstream.stream import NatsStream
from bufstore.testing import CHECKS, Check
from conftest import Deployment
from helpers import eventually, fresh, let_all_go, query, run_of, said
from transaction_pooler import TransactionPooler


@pytest.mark.parametrize("check", CHECKS, ids=str)
@pytest.mark.parametrize("inner", ["postgres", "memory"])
async def test_it_keeps_the_contract(deployment: Deployment, check: Check, inner: str) -> None:
    async with deployment.store(MemoryThreadStore() if inner == "memory" else None) as store:
        await check(store)


@pytest.mark.long  # the same contract, with Strong reads
@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_strong_reads_keep_the_contract(deployment: Deployment, check: Check) -> None:
    async with deployment.store(consistency=Consistency.STRONG) as store:
        await check(store)


async def test_a_blocking_store_does_the_same(deployment: Deployment) -> None:
    def work() -> None:
        url, config = deployment.servers.nats.url, deployment.config()
        with BlockingBufferedStore(
            lambda: BufferedThreadStore.open(deployment.inner(), nats=url, config=config)
        ) as store:
            thread_id = fresh()
            receipt = store.checkpoint(thread_id, [said(0)], run_of(thread_id))
            assert store.load_messages(thread_id, at_least=receipt) == [said(0)]
            store.force_flush(thread_id)
            assert store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [said(0)]
            assert [r.message for r in store.query_messages(thread_id).records] == [said(0)]
            health = store.health()
            until = time.monotonic() + 20
            while not health.ok and time.monotonic() < until:  # it asks for two seconds, and the machine may pause
                health = store.health()
            assert (health.ok, health.can_write, health.can_read, health.flushing) == (True, True, True, True)

    await asyncio.to_thread(work)


async def test_what_is_not_flushed_is_counted(deployment: Deployment) -> None:
    async with deployment.store(flush_interval_s=600) as store, deployment.store(flusher=False) as other:
        for flushed in (0, 10):
            threads = [fresh() for _ in range(10)]
            for t in threads:
                await store.checkpoint(t, [said(0)], run_of(t))
            for one in (store, other):
                found = await one.statistics()
                assert found.log_bytes_unflushed * (flushed + 10) // 10 == pytest.approx(found.log_bytes, rel=0.01)
            await store.force_flush_all()
            for one in (store, other):
                await eventually(lambda one=one: _all_counted_as_flushed(one))
            await asyncio.sleep(1.1)  # what comes within a second of being asked may be flushed at once, too


async def _all_counted_as_flushed(store: BufferedThreadStore) -> bool:
    return (await store.statistics()).log_bytes_unflushed == 0


async def test_one_message_per_checkpoint_on_the_warm_path(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        thread_id = fresh()

        async def cost(*arguments: Any) -> tuple[int, int]:
            before = store.buffer.session.traffic
            await store.checkpoint(*arguments)
            after = store.buffer.session.traffic
            return after[0] - before[0], after[1] - before[1]

        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        for n in range(2, 10):
            assert await cost(thread_id, [said(i) for i in range(n)], run_of(thread_id)) == (1, 1)
        assert await cost(thread_id, [said(0)], run_of(thread_id, 1)) == (2, 2), "the first of a run claims its id"
        assert await cost(thread_id, [said(1)], run_of(thread_id, 1)) == (1, 1)


async def test_bytes_in_the_log_do_not_grow_with_the_thread(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        thread_id = fresh()
        messages = [said(n) for n in range(300)]
        for n in range(20):  # until the ring of recent keys is full
            await store.checkpoint(thread_id, messages[:3], run_of(thread_id, n % 2))

        async def growth(count: int) -> int:
            before = (await store.statistics()).log_bytes
            await store.checkpoint(thread_id, messages[:count], run_of(thread_id))
            return (await store.statistics()).log_bytes - before

        short = await growth(4)
        for n in range(5, 300):
            await store.checkpoint(thread_id, messages[:n], run_of(thread_id))
        assert await growth(300) <= 1.3 * short


async def test_all_three_levels_show_what_they_promise(deployment: Deployment) -> None:
    async with deployment.store(flush_interval_s=600) as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await store.checkpoint(thread_id, [said(0), said(1)], run_of(thread_id))
        assert await store.load_messages(thread_id) == [said(0), said(1)]
        assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) is None
        assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == [said(0), said(1)]
        assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [said(0), said(1)]
        await eventually(lambda: _transactions(store, 1))


async def _transactions(store: BufferedThreadStore, count: int) -> bool:
    return (await store.statistics()).flusher.transactions == count


async def test_what_is_written_is_flushed_by_itself_in_time(deployment: Deployment) -> None:
    async with deployment.store(flush_interval_s=0.2) as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))

        async def there() -> bool:
            return await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [said(0)]

        await eventually(there, 15)


async def test_a_tail_in_the_middle_of_a_thread_is_overlaid(deployment: Deployment) -> None:
    async with deployment.store(flush_interval_s=600) as store:
        thread_id = fresh()
        run = run_of(thread_id)
        await store.checkpoint(thread_id, [said(n) for n in range(5)], run)
        await store.force_flush(thread_id)
        await store.checkpoint(thread_id, [said(0), said(1), said(7)], run)
        await store.checkpoint_append(thread_id, [said(8)], run_of(thread_id, 1), expected_version=3)
        found = await store.load_checkpoint(thread_id)
        assert found is not None
        assert found.messages == [said(0), said(1), said(7), said(8)]
        assert found.latest_run == run_of(thread_id, 1)
        assert await store.load_run(run.run_id) == run
        await store.force_flush(thread_id)
        assert await store.load_checkpoint(thread_id, consistency=Consistency.EVENTUAL) == found


async def test_a_receipt_of_another_instance_is_visible(deployment: Deployment) -> None:
    async with (
        deployment.store() as writer,
        deployment.store(flusher=False, consistency=Consistency.EVENTUAL) as reader,
    ):
        thread_id = fresh()
        for n in range(1, 6):
            receipt = await writer.checkpoint(thread_id, [said(i) for i in range(n)], run_of(thread_id))
            seen = await reader.load_messages(thread_id, at_least=receipt)
            assert seen is not None
            assert len(seen) >= n


async def test_a_read_that_cannot_be_fresh_says_so(deployment: Deployment) -> None:
    async with (
        deployment.store(flusher=False) as writer,
        deployment.store(flusher=False, read_timeout_s=0.3) as reader,
    ):
        thread_id = fresh()
        receipt = await writer.checkpoint(thread_id, [said(0)], run_of(thread_id))
        with pytest.raises(ReadNotFresh):
            await reader.load_messages(thread_id, consistency=Consistency.STRONG)
        with pytest.raises(ReadNotFresh):
            await reader.load_messages(thread_id, consistency=Consistency.EVENTUAL, at_least=receipt)
        # The log can be read, but 0.3 s may be too short while the machine pauses.
        assert await eventually(lambda: _read_in_time(reader, thread_id, at_least=receipt)) == [said(0)]


async def _read_in_time(store: BufferedThreadStore, thread_id: str, **how: Any) -> Any:
    """Return the messages, or None when a store with a short time could not read them in it."""
    try:
        return await store.load_messages(thread_id, **how)
    except (ReadNotFresh, Unavailable):
        return None


async def test_force_flush_reaches_the_owner_on_another_instance(deployment: Deployment) -> None:
    async with (
        deployment.store(flush_interval_s=600) as owner,
        deployment.store(flusher=False) as other,
    ):
        thread_ids = [fresh() for _ in range(20)]
        for thread_id in thread_ids:
            await other.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await other.force_flush(thread_ids[0], timeout_s=20)
        await other.force_flush_all(timeout_s=20)

        async def counted() -> bool:  # the owner may hear of its commit after the other has seen it
            return (await owner.statistics()).flusher.entries == 20

        await eventually(counted)
        for thread_id in thread_ids:
            assert await other.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [said(0)]


async def test_force_flush_ends_at_its_deadline(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        thread_id = fresh()
        receipt = await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        began = time.monotonic()
        with pytest.raises(FlushTimeout) as caught:
            await store.force_flush(thread_id, timeout_s=4)
        assert time.monotonic() - began < 12, "without a time it would take half a minute"
        assert (caught.value.target, caught.value.flushed) == (receipt.thread_seq, 0)


async def test_two_instances_on_one_thread_lose_nothing(deployment: Deployment) -> None:
    async with deployment.store() as one, deployment.store() as two:
        thread_id = fresh()

        async def write(store: Any, who: int) -> None:
            for n in range(30):
                await store.checkpoint_append(thread_id, [{"id": f"{who}-{n}"}], run_of(thread_id, who))

        await asyncio.gather(write(one, 1), write(two, 2), write(one, 3))
        found = await two.load_messages(thread_id)
        assert found is not None
        ids = [m["id"] for m in found]
        assert len(set(ids)) == len(ids) == 90
        for who in (1, 2, 3):
            assert [i for i in ids if i.startswith(f"{who}-")] == [f"{who}-{n}" for n in range(30)]
        assert (await one.statistics()).conflicts + (await two.statistics()).conflicts > 0
        await one.force_flush(thread_id)
        assert await one.load_messages(thread_id, consistency=Consistency.EVENTUAL) == found


async def test_a_version_is_taken_by_one_of_two_writers(deployment: Deployment) -> None:
    async with deployment.store() as one, deployment.store() as two:
        thread_id = fresh()
        await one.checkpoint(thread_id, [said(0)], run_of(thread_id))
        outcomes = await asyncio.gather(
            *(
                s.checkpoint_append(thread_id, [{"n": i}], run_of(thread_id), expected_version=1)
                for i, s in enumerate((one, two))
            ),
            return_exceptions=True,
        )
        assert sorted(type(o).__name__ for o in outcomes) == ["Receipt", "VersionConflict"]
        refused = next(o for o in outcomes if isinstance(o, VersionConflict))
        assert (refused.expected, refused.actual) == (1, 2)


async def test_an_idempotency_key_holds_across_instances_and_flushes(deployment: Deployment) -> None:
    async with deployment.store() as one, deployment.store() as two:
        thread_id = fresh()
        messages = [said(0)]
        first = await one.checkpoint(thread_id, messages, run_of(thread_id), idempotency_key="k")
        assert not first.repeated
        assert (await two.checkpoint(thread_id, messages, run_of(thread_id), idempotency_key="k")).repeated
        with pytest.raises(IdempotencyConflict):
            await two.checkpoint(thread_id, [said(1)], run_of(thread_id), idempotency_key="k")
        for n in range(10):
            await two.checkpoint(thread_id, [said(0), said(n)], run_of(thread_id))
        await one.force_flush(thread_id)
        assert (await one.checkpoint(thread_id, messages, run_of(thread_id), idempotency_key="k")).repeated
        assert len(await one.load_messages(thread_id) or []) == 2


async def test_a_run_id_belongs_to_one_thread(deployment: Deployment) -> None:
    async with deployment.store() as one, deployment.store() as two:
        a, b = fresh(), fresh()
        await one.checkpoint(a, [], run_of(a))
        stolen = run_of(a)
        with pytest.raises(AlreadyExists):
            await two.checkpoint(b, [], type(stolen)(run_id=stolen.run_id, thread_id=b))
        assert await two.load_thread(b) is None


@pytest.mark.parametrize("size", [0, (1 << 20) - 1025, 1 << 20, 3 << 20, 20 << 20])
async def test_a_checkpoint_of_any_size_round_trips(deployment: Deployment, size: int) -> None:
    async with deployment.store() as store:
        thread_id = fresh()
        message = {"blob": bytes(range(256)) * (size // 256)}
        await store.checkpoint(thread_id, [message], run_of(thread_id))
        await store.checkpoint_append(thread_id, [{"after": size}], run_of(thread_id))
        assert await store.load_messages(thread_id) == [message, {"after": size}]
        await store.force_flush(thread_id)
        assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [message, {"after": size}]


async def test_a_large_entry_is_neither_damaged_nor_purged_because_an_old_leader_lacks_it(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: what it and its successor said in turns made the entry damaged; what it said alone, purged."""
    thread_id, message, get = fresh(), said(0, 2_000_000), NatsStream._leader_get
    lacks: list[bool] = []

    async def in_turns(self: NatsStream, request: dict[str, Any], timeout_s: float) -> Any:
        return None if lacks and lacks.pop() else await get(self, request, timeout_s)

    async with deployment.store(flusher=False) as writer, deployment.store(flusher=False) as reader:
        await writer.checkpoint(thread_id, [message], run_of(thread_id))
        with monkeypatch.context() as patched:
            patched.setattr(NatsStream, "_leader_get", in_turns)
            lacks[:] = True, False, True
            assert await reader.load_messages(thread_id) == [message]
            lacks[:] = True, True
            assert len([entry async for entry in reader.buffer.log.scan()]) == 1


async def test_what_is_too_large_is_refused_before_anything_is_sent(deploy: Any) -> None:
    deployment = deploy(max_entry_bytes=1 << 20)
    async with deployment.store() as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        with pytest.raises(TooLarge):
            await store.checkpoint(thread_id, [said(0), {"blob": b"x" * (1 << 20)}], run_of(thread_id))
        await store.checkpoint(thread_id, [said(0), said(1)], run_of(thread_id))
        assert await store.load_messages(thread_id) == [said(0), said(1)]


async def test_a_locked_row_delays_only_its_own_thread(deployment: Deployment) -> None:
    async with deployment.store() as store:
        held, free = fresh("held"), [fresh("free") for _ in range(20)]
        await store.checkpoint(held, [said(0)], run_of(held))
        await store.force_flush(held)
        async with await psycopg.AsyncConnection.connect(deployment.servers.postgres.dsn) as connection:
            await connection.execute(
                f"SELECT 1 FROM {deployment.name}.threads WHERE thread_id = %s FOR UPDATE",  # type: ignore[arg-type]
                [held],
            )
            await store.checkpoint(held, [said(0), said(1)], run_of(held))
            for thread_id in free:
                await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
            for thread_id in free:
                await store.force_flush(thread_id, timeout_s=20)
            with pytest.raises(FlushTimeout):
                await store.force_flush(held, timeout_s=0.2)
            assert await store.load_messages(held) == [said(0), said(1)]
        await store.force_flush(held)
        assert await store.load_messages(held, consistency=Consistency.EVENTUAL) == [said(0), said(1)]


async def test_while_somebody_else_parks_poison_waits_and_delays_no_other(deploy: Callable[..., Deployment]) -> None:
    """A process that parks holds a lock until it commits; if it stops there, as long as Postgres allows."""
    deployment = deploy(partitions=1)
    threads = [fresh() for _ in range(20)]
    async with deployment.store(flusher=False) as writer:
        for number, thread_id in enumerate(threads):
            await writer.checkpoint(thread_id, [said(0)], run_of(thread_id))
            if number == 10:
                await writer.buffer.log.publish(Outgoing(writer.buffer.subjects.of("poisoned"), b"no entry"), 5)
                await writer.buffer.session.connection.request(writer.buffer.subjects.groups, b"no group", 5)
        other = await psycopg.AsyncConnection.connect(deployment.servers.postgres.dsn)
        async with other:
            await other.execute(f"SELECT 1 FROM {deployment.name}.buffer_log FOR UPDATE")  # type: ignore[arg-type]
            async with deployment.store() as store:
                await asyncio.gather(*(writer.force_flush(t, timeout_s=20) for t in threads))
                assert await store.quarantined() == 0
                await other.rollback()
                await eventually(lambda: _is(store.quarantined(), 2))


async def test_poison_is_parked_whole_and_delays_nobody(deployment: Deployment) -> None:
    async with deployment.store() as store:
        thread_id, other = fresh(), fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        subject = store.buffer.subjects.of(thread_id)
        await store.buffer.log.publish(Outgoing(subject, b"no entry at all"), 5)
        await store.buffer.session.connection.request(store.buffer.subjects.groups, b"no group", 5)
        await store.checkpoint(other, [said(0)], run_of(other))
        await store.force_flush(other)
        await eventually(lambda: _is(store.quarantined(), 2))
        with pytest.raises(ThreadQuarantined):
            await store.load_messages(thread_id)
        with pytest.raises(ThreadQuarantined):
            await store.checkpoint_append(thread_id, [said(1)], run_of(thread_id))
        await store.checkpoint(thread_id, [said(0), said(2)], run_of(thread_id))  # a whole list heals the thread
        assert await store.load_messages(thread_id) == [said(0), said(2)]
        await store.force_flush(thread_id)
        assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [said(0), said(2)]
        kept = await query(
            deployment.servers.postgres.dsn, f"SELECT messages FROM {deployment.name}.buffer_quarantine ORDER BY seq"
        )
        assert b"no entry at all" in kept[0][0]
        assert b"no group" in kept[1][0]


async def _is(awaitable: Any, expected: Any) -> bool:
    return bool(await awaitable == expected)


async def test_an_entry_that_the_store_refuses_is_parked_alone(deployment: Deployment) -> None:
    class Picky(PostgresThreadStore):
        """Refuses some threads, as a table's constraint would."""

        async def apply(self, connection: Any, batch: Any) -> None:
            if any(c.thread_id.startswith("bad") for c in batch):
                await connection.execute("SELECT 1/0")
            await super().apply(connection, batch)

    inner = Picky(deployment.servers.postgres.dsn, schema=deployment.name, pool_size=4)
    async with deployment.store(inner, flush_interval_s=0.3) as store:
        bad, good = fresh("bad"), [fresh("good") for _ in range(30)]
        for thread_id in [*good[:15], bad, *good[15:]]:
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        for thread_id in good:
            await store.force_flush(thread_id)
            assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [said(0)]
        await eventually(lambda: _is(store.quarantined(), 1))


async def test_an_app_whose_code_fails_on_one_thread_delays_only_that(deployment: Deployment) -> None:
    class Buggy(PostgresThreadStore):
        mended = False

        async def apply(self, connection: Any, batch: Any) -> None:
            if not self.mended and any(c.thread_id.startswith("bad") for c in batch):
                raise KeyError("a bug of the app")
            await super().apply(connection, batch)

    inner = Buggy(deployment.servers.postgres.dsn, schema=deployment.name, pool_size=4)
    async with deployment.store(inner) as store:
        bad, good = fresh("bad"), [fresh("good") for _ in range(10)]
        for thread_id in [bad, *good]:
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        for thread_id in good:
            await store.force_flush(thread_id)
        assert await store.quarantined() == 0
        inner.mended = True
        await store.force_flush(bad)
        assert await store.load_messages(bad, consistency=Consistency.EVENTUAL) == [said(0)]


@pytest.mark.long  # twenty seconds
async def test_it_goes_on_after_the_log_was_purged(deploy: Callable[..., Deployment]) -> None:
    deployment = deploy(failover_window_s=8.0)
    short = {"append_timeout_s": 4.0, "read_timeout_s": 4.0, "retain_after_flush_s": 8.0}
    thread_id = fresh()

    async def log_is_short(store: Any) -> bool:
        other = fresh()
        await store.checkpoint(other, [said(0)], run_of(other))
        await store.force_flush(other)
        return not await store.buffer.log.after(store.buffer.subjects.of(thread_id), 0)

    async with deployment.store(**short) as store:
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id), idempotency_key="first")
        await store.force_flush(thread_id)
        await eventually(lambda: log_is_short(store), 60)
        assert await store.load_messages(thread_id) == [said(0)]
    async with deployment.store(**short) as store:  # a new process, which must learn the key from Postgres
        again = await store.checkpoint(thread_id, [said(0)], run_of(thread_id), idempotency_key="first")
        assert again.repeated
        await store.checkpoint_append(thread_id, [said(1)], run_of(thread_id), expected_version=1)
        await store.force_flush(thread_id)
        await eventually(lambda: log_is_short(store), 60)
    async with deployment.store(**short) as store:
        await store.checkpoint(thread_id, [said(0), said(1), said(2)], run_of(thread_id))
        assert await store.load_messages(thread_id) == [said(0), said(1), said(2)]
        await store.force_flush(thread_id)
        assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [said(0), said(1), said(2)]


async def test_closing_drains(deployment: Deployment) -> None:
    thread_ids = [fresh() for _ in range(50)]
    async with deployment.store(flush_interval_s=600) as store:
        for thread_id in thread_ids:
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
    async with deployment.inner() as plain:
        for thread_id in thread_ids:
            assert await plain.load_messages(thread_id) == [said(0)]


async def test_closing_twice_and_calling_afterwards(deployment: Deployment) -> None:
    async with deployment.store() as store:
        await store.aclose()
        await store.aclose()
        with pytest.raises(BufstoreError):
            await store.checkpoint("t", [], run_of("t"))
        with pytest.raises(BufstoreError):
            await store.load_messages("t")


async def test_partitions_move_to_a_new_instance_and_back(deployment: Deployment) -> None:
    def owned(*stores: Any) -> list[int]:
        return sorted(p for s in stores for p in s.buffer.flusher.state.partitions)

    async def all_owned(*stores: Any) -> bool:
        return owned(*stores) == list(range(8)) and all(s.buffer.flusher.state.partitions for s in stores)

    async with deployment.store() as one:
        await eventually(lambda: all_owned(one))
        async with deployment.store() as two:
            await eventually(lambda: all_owned(one, two))
            for _ in range(20):
                thread_id = fresh()
                await two.checkpoint(thread_id, [said(0)], run_of(thread_id))
                await one.force_flush(thread_id)
        await eventually(lambda: all_owned(one))


async def test_a_lost_hot_bucket_makes_nothing_wrong(deployment: Deployment) -> None:
    async with deployment.store() as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await store.buffer.session.stream.api(f"STREAM.DELETE.KV_{deployment.log.bucket}")
        await store.checkpoint(thread_id, [said(0), said(1)], run_of(thread_id))
        await store.checkpoint(thread_id, [said(2)], run_of(thread_id, 1))
        await store.force_flush(thread_id)
        assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [said(2)]
        assert await store.load_run(run_of(thread_id).run_id) == run_of(thread_id)


async def test_a_deleted_consumer_is_replaced(deployment: Deployment) -> None:
    async with deployment.store() as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await store.force_flush(thread_id)

        async def consumers() -> list[str]:  # one of them follows the groups
            names: list[str] = (await store.buffer.session.stream.api(f"CONSUMER.NAMES.{deployment.log.stream}"))[
                "consumers"
            ]
            return names

        for name in await eventually(consumers):
            await store.buffer.session.stream.api(f"CONSUMER.DELETE.{deployment.log.stream}.{name}")
        await store.checkpoint(thread_id, [said(0), said(1)], run_of(thread_id))
        await store.force_flush(thread_id)
        assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [said(0), said(1)]


async def test_it_works_with_a_nats_py_whose_inside_is_not_known(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "supported", False)
    async with deployment.store() as store:
        thread_ids = [fresh() for _ in range(40)]

        async def talk(thread_id: str) -> None:
            for n in range(1, 6):
                await store.checkpoint(thread_id, [said(i) for i in range(n)], run_of(thread_id))

        await asyncio.gather(*map(talk, thread_ids))
        await store.force_flush_all()
        for thread_id in thread_ids:
            found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
            assert found == [said(i) for i in range(5)]


async def test_it_works_behind_a_transaction_pooler(deployment: Deployment) -> None:
    async with TransactionPooler(deployment.servers.postgres.dsn, servers=2) as pooler:
        inner = PostgresThreadStore(pooler.dsn, schema=deployment.name, pool_size=8)
        async with deployment.store(inner) as store:
            thread_ids = [fresh() for _ in range(20)]

            async def talk(thread_id: str) -> None:
                for n in range(1, 6):
                    await store.checkpoint(thread_id, [said(i) for i in range(n)], run_of(thread_id))
                    assert len(await store.load_messages(thread_id) or []) == n

            await asyncio.gather(*map(talk, thread_ids))
            await store.force_flush_all()
            for thread_id in thread_ids:
                found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
                assert found == [said(i) for i in range(5)]


async def test_an_append_to_an_unknown_thread_needs_postgres(own_servers: Servers) -> None:
    deployment = Deployment(own_servers)
    async with deployment.store(read_timeout_s=4.0) as store:
        known, purged = fresh(), fresh()
        await store.checkpoint(known, [said(0)], run_of(known))
        await store.checkpoint(purged, [said(0)], run_of(purged))
        await store.force_flush_all()
        store.buffer.appender.forget(purged)
        await let_all_go(store)
        await store.checkpoint(known, [said(0)], run_of(known))
        own_servers.postgres.stop()
        await store.checkpoint_append(known, [said(1)], run_of(known))
        with pytest.raises(StoreUnavailable):
            await store.checkpoint_append(purged, [said(1)], run_of(purged))
        with pytest.raises(StoreUnavailable):
            await store.checkpoint(purged, [said(1)], run_of(purged), idempotency_key="k")
        await store.checkpoint(purged, [said(0), said(2)], run_of(purged))
        assert await store.load_messages(purged) == [said(0), said(2)]
        own_servers.postgres.start()
        await store.force_flush_all()
        assert await store.load_messages(purged, consistency=Consistency.EVENTUAL) == [said(0), said(2)]
        assert await store.load_messages(known, consistency=Consistency.EVENTUAL) == [said(0), said(1)]
