"""The mailbox on all three stores: the conformance suite, and what each store promises beyond it."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from typing import Any

import pytest

from bufstore import AlreadyExists, Closed, ConfigDrift, ConfigError, StoreUnavailable
from bufstore.embedded import Servers
from bufstore.jetstream.subject_tokens import token
from bufstore.mailbox import (
    Live,
    MemoryMailboxStore,
    NatsMailboxNames,
    NatsMailboxStore,
    PostgresMailboxStore,
    Status,
    Sweeper,
    Worker,
)
from bufstore.mailbox.memory import MemoryBackend
from bufstore.mailbox.nats import NatsBackend
from bufstore.mailbox.postgres import PostgresBackend
from bufstore.mailbox.store import MailboxStore
from bufstore.notify import MemoryNotifier, PostgresNotifier
from bufstore.testing import Check
from conformance import LIVE_MAILBOX_CHECKS, MAILBOX_CHECKS
from helpers import eventually, fresh, query
from mailboxes import KINDS, Mailboxes

#: Records in the tests of cost and growth; set it to 100 000 for an operator's scale.
MANY = int(os.environ.get("BUFSTORE_MAILBOX_RECORDS", "1500"))


#: Postgres has no live deliveries.
CONTRACTS = [
    pytest.param(kind, check, id=f"{kind}-{check}")
    for kind in KINDS
    for check in (MAILBOX_CHECKS if kind == "postgres" else [*MAILBOX_CHECKS, *LIVE_MAILBOX_CHECKS])
]


@pytest.mark.parametrize(("mailboxes", "check"), CONTRACTS, indirect=["mailboxes"])
async def test_it_keeps_the_mailbox_contract(check: Check, mailboxes: Mailboxes) -> None:
    async with mailboxes.open() as stores:
        await check(stores)


async def test_a_closed_mailbox_says_so(mailboxes: Mailboxes) -> None:
    store = mailboxes.store()
    async with store:
        await store.enqueue("t")
    await store.aclose()
    for call in (lambda: store.enqueue("t"), lambda: store.claim("t", "w"), lambda: store.load_dispatch("t", "d")):
        with pytest.raises(Closed):
            await call()


async def test_an_instance_that_starts_again_finds_everything(mailboxes: Mailboxes) -> None:
    thread_id, hot = fresh(), fresh()
    async with mailboxes.open(1) as (store,):
        first = await store.enqueue(thread_id, b"1", dedupe_key="k")
        second = await store.enqueue(thread_id, b"2", available_at_ms=int(time.time() * 1000) + 3600_000)
        claim = await store.claim(thread_id, "w")
        assert claim is not None
        for n in range(0, 200, 50):
            await asyncio.gather(*(store.enqueue(hot, str(n + i).encode()) for i in range(50)))
    async with mailboxes.open(1) as (store,):
        assert [d.dispatch_id for d in await store.list_dispatches(thread_id)] == [
            first.dispatch_id,
            second.dispatch_id,
        ]
        with pytest.raises(AlreadyExists):
            await store.enqueue(thread_id, dedupe_key="k")
        assert (await store.ack(claim)).status is Status.ACKED
        assert len(await store.list_dispatches(hot, limit=1000)) == 200
        assert await store.queued_thread_ids() == sorted([thread_id, hot])
        assert {s.thread_id for s in await store.pull_signals(timeout_s=10)} >= {hot}


@pytest.mark.long
async def test_a_claim_costs_the_same_however_much_is_queued(mailboxes: Mailboxes) -> None:
    async with mailboxes.open(1) as (store,):
        few, many = fresh(), fresh()

        async def fill(thread_id: str, count: int) -> None:
            for start in range(0, count, 500):
                await asyncio.gather(*(store.enqueue(thread_id) for _ in range(min(500, count - start))))

        async def took(thread_id: str) -> float:
            began = time.perf_counter()
            claim = await store.claim(thread_id, "w")
            seconds = time.perf_counter() - began
            assert claim is not None
            await store.ack(claim)
            return seconds

        await fill(few, 100)
        await fill(many, MANY)
        # Records of other threads must not matter either.
        await asyncio.gather(*(store.enqueue(fresh()) for _ in range(MANY // 10)))
        # In turns, so that whatever else the machine does meanwhile delays both.
        both = [(await took(few), await took(many)) for _ in range(40)]
        small, large = (sorted(each)[len(both) // 2] for each in zip(*both, strict=True))
        # Wide, because the machine may be busy: a scan of the queue would cost hundreds of times as much.
        assert large < 5 * small + 0.01, (small, large)


async def test_one_thread_with_a_claim_and_a_long_queue_is_recovered(mailboxes: Mailboxes) -> None:
    async with mailboxes.open(timeout_s=30.0) as (a, b):
        thread_id, t = fresh(), int(time.time() * 1000)
        count = min(MANY, 2000)
        first = await a.enqueue(thread_id, now_ms=t)
        for start in range(0, count, 500):
            await asyncio.gather(*(a.enqueue(thread_id, now_ms=t) for _ in range(min(500, count - start))))
        claim = await a.claim(thread_id, "lost", lease_s=1, now_ms=t)
        assert claim is not None
        assert claim.dispatch_id == first.dispatch_id
        assert [d.dispatch_id for d in await b.reclaim_expired(now_ms=t + 5000)] == [first.dispatch_id]
        again = await b.claim(thread_id, "w")
        assert again is not None
        assert again.dispatch_id == first.dispatch_id
        assert len((await b.interrupt(thread_id)).superseded) == count


async def test_eight_instances_share_a_thread_without_two_owners(mailboxes: Mailboxes) -> None:
    async with mailboxes.open(8) as stores:
        thread_id = fresh()
        put = [await stores[0].enqueue(thread_id) for _ in range(24)]
        holders: list[str] = []
        done: list[str] = []

        async def work(store: Any, name: str) -> None:
            while len(done) < len(put):
                claim = await store.claim(thread_id, name)
                if claim is None:
                    await asyncio.sleep(0.002)
                    continue
                assert holders == []
                holders.append(name)
                await asyncio.sleep(0)
                holders.remove(name)
                done.append((await store.ack(claim)).dispatch_id)

        await asyncio.gather(*(work(store, f"w{n}") for n, store in enumerate(stores)))
        assert done == [d.dispatch_id for d in put]


async def test_sweepers_take_turns(mailboxes: Mailboxes) -> None:
    async with mailboxes.open(3, sweep_interval_s=600.0) as stores:
        assert [await Sweeper(store).sweep() for store in stores].count(True) == 1


async def test_sweepers_clean_up(mailboxes: Mailboxes) -> None:
    async with mailboxes.open(3, keep_finished_s=0.001) as stores:
        thread_id, idle = fresh(), fresh()
        await stores[0].enqueue(idle, dedupe_key="k", dispatch_id="own")
        claim = await stores[0].claim(idle, "w")
        assert claim is not None
        await stores[0].ack(claim)
        await stores[0].enqueue(thread_id)
        assert await stores[0].claim(thread_id, "w", lease_s=0.001) is not None
        sweepers = [Sweeper(store) for store in stores]
        async with sweepers[0], sweepers[1], sweepers[2]:

            async def clean() -> bool:
                found = await stores[1].list_dispatches(thread_id)
                gone = await stores[1].load_dispatch(idle, "own") is None
                return gone and [d.status for d in found] == [Status.QUEUED]

            await eventually(clean)
        assert all(s.trouble is None for s in sweepers)


async def test_a_sweeper_survives_its_failures_and_says_so(servers: Servers) -> None:
    boxes = Mailboxes("memory", servers)
    async with boxes.open(1, sweep_interval_s=0.01) as (store,):
        real, failing = store.backend.sweeps, True

        async def sweeps(interval_s: float) -> bool:
            if failing:
                raise RuntimeError("nobody thought of this")
            return await real(interval_s)

        store.backend.sweeps = sweeps  # type: ignore[method-assign]
        async with Sweeper(store) as sweeper:

            async def troubled() -> bool:
                return sweeper.trouble is not None and "nobody thought" in sweeper.trouble

            await eventually(troubled)
            failing = False

            async def well() -> bool:
                return sweeper.trouble is None and sweeper.last_pass is not None

            await eventually(well)
            assert store.statistics().counts["sweep_failures"] >= 1


@pytest.mark.long
async def test_nothing_grows_with_what_has_been(on_nats: Mailboxes, on_postgres: Mailboxes) -> None:
    async with on_nats.open(1) as (store,):
        for n in range(50):
            thread_id = fresh()
            await store.enqueue(thread_id, dedupe_key="k", dispatch_id="own", priority=128 - n % 3)
            claim = await store.claim(thread_id, "w")
            assert claim is not None
            await store.ack(claim)
        for signal in await store.pull_signals(limit=100, timeout_s=0):
            await signal.ack()
        assert await store.purge_finished(int(time.time() * 1000) + 60_000) == 50
        backend = store.backend
        assert isinstance(backend, NatsBackend)

        async def empty() -> bool:
            await store.backend.sweeps(0.001)
            # The running slot's leases are removed after it; here the slot is over.
            await store.reclaim_expired(now_ms=int(time.time() * 1000) + 120_000)
            left = await backend._stream.after(backend._keys.prefix + ">", 0, 5)
            # The sweeper's own record stays, and for some days an empty mark of a thread.
            return all(backend._keys.kind(m.subject) == "t" and not m.body for m in left if "sweep" not in m.subject)

        await eventually(empty)
    async with on_postgres.open(1) as (store,):
        for _ in range(20):
            thread_id = fresh()
            await store.enqueue(thread_id)
            claim = await store.claim(thread_id, "w")
            assert claim is not None
            await store.ack(claim)
        assert await store.purge_finished(int(time.time() * 1000) + 60_000) == 20
        for table in ("mailbox_threads", "mailbox_dispatches"):
            assert await query(
                on_postgres.servers.postgres.dsn, f"SELECT count(*) FROM {on_postgres.name}.{table}"
            ) == [(0,)]


async def test_what_is_enqueued_while_its_thread_is_forgotten_is_found(mailboxes: Mailboxes) -> None:
    threads = [fresh() for _ in range(40)]

    async def work_off(store: MailboxStore, thread_id: str) -> None:
        claim = await store.claim(thread_id, "w")
        assert claim is not None
        await store.ack(claim)

    async with mailboxes.open() as (a, b):
        for _ in range(3):
            await asyncio.gather(*(a.enqueue(thread_id, priority=3) for thread_id in threads))
            await asyncio.gather(*(work_off(a, thread_id) for thread_id in threads))
            forgetting = asyncio.create_task(b.purge_finished(b.backend.now_ms() + 60_000))
            for n in range(0, len(threads), 8):
                await asyncio.gather(*(a.enqueue(thread_id, priority=3) for thread_id in threads[n : n + 8]))
            await forgetting
            await asyncio.gather(*(work_off(a, thread_id) for thread_id in threads))


@pytest.mark.parametrize("behind_s", [0, 7200])
async def test_tokens_go_on_when_the_bucket_was_made_again(
    behind_s: int, on_nats: Mailboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = []  # of a bucket, and of its replacement, made by a host whose clock is far behind
    for _ in range(2):
        async with on_nats.open(1) as (store,):
            await store.enqueue("t")
            claim = await store.claim("t", "w")
            assert claim is not None
            tokens.append(claim.token)
            assert isinstance(store.backend, NatsBackend)
            await store.backend._stream.api(f"STREAM.DELETE.KV_{on_nats.name}")
        clock = (time.time() - behind_s, time.time_ns() - behind_s * 10**9)
        monkeypatch.setattr(time, "time", lambda clock=clock: clock[0])
        monkeypatch.setattr(time, "time_ns", lambda clock=clock: clock[1])
    assert tokens[0] < tokens[1]


async def test_a_signal_is_removed_when_it_was_answered_and_no_sooner(on_nats: Mailboxes) -> None:
    async with on_nats.open() as (a, b):
        await a.enqueue("one")
        (signal,) = await a.pull_signals(timeout_s=5)
        for store in (a, b):
            assert isinstance(store.backend, NatsBackend)
            await store.backend.forget_answered()
        await signal.nack(0)
        (signal,) = await b.pull_signals(timeout_s=5)
        assert signal.thread_id == "one"
        claim = await a.claim("one", "w")
        assert claim is not None
        await a.ack(claim)
        assert await signal.ack()

        async def gone() -> bool:
            assert isinstance(a.backend, NatsBackend)
            await a.backend.forget_answered()
            subject = a.backend._keys.of("s", token("one"))
            return not await a.backend._stream.last([subject], 5)

        await eventually(gone)


async def test_a_deleted_signal_consumer_is_made_again(on_nats: Mailboxes) -> None:
    async with on_nats.open(1) as (store,):
        await store.enqueue("one")
        assert isinstance(store.backend, NatsBackend)
        await store.backend._stream.api(f"CONSUMER.DELETE.KV_{on_nats.name}.dispatch-worker")

        async def signalled() -> bool:
            return [s.thread_id for s in await store.pull_signals(timeout_s=0.2)] == ["one"]

        await eventually(signalled)


async def test_instances_with_other_names_are_refused(on_nats: Mailboxes) -> None:
    async with on_nats.open(1):
        for other in ({"consumer": "other"}, {"live_subject": "other"}, {"replicas": 3}, {"max_bytes": 1 << 20}):
            names = NatsMailboxNames(**({"bucket": on_nats.name, "max_bytes": 256 << 20} | other))
            with pytest.raises(ConfigDrift) as caught:
                async with NatsMailboxStore(on_nats.servers.nats.url, names=names):
                    pass
            assert on_nats.name in str(caught.value)
        with pytest.raises(ConfigDrift, match="ack_wait"):
            async with on_nats.store(signal_ack_wait_s=7.0):
                pass


async def test_a_mailbox_in_a_schema_of_any_name(servers: Servers) -> None:
    schema = f'it\'s "{secrets.token_hex(3)}" $1 %s'
    async with PostgresMailboxStore(servers.postgres.dsn, schema=schema, pool_size=2) as store:
        await store.enqueue("t")
        claim = await store.claim("t", "w")
        assert claim is not None
        await store.ack(claim)
    with pytest.raises(ConfigError):
        PostgresMailboxStore(servers.postgres.dsn, schema="pg_x")


async def test_who_only_enqueues_delays_nothing_by_an_old_look_at_postgres_clock(on_postgres: Mailboxes) -> None:
    """Only sweeps set it again; Postgres' clock may have been set back since."""
    async with on_postgres.open() as (ahead, worker):
        assert isinstance(ahead.backend, PostgresBackend)
        ahead.backend._offset_ms += 57_000

        async def signals() -> list[str]:
            return [signal.thread_id for signal in await worker.pull_signals(timeout_s=0)]

        await ahead.enqueue("t", b"now")
        assert await signals() == ["t"]
        claim = await worker.claim("t", "w")
        assert claim is not None
        await worker.ack(claim)
        await ahead.enqueue("t", b"later", available_at_ms=ahead.backend.now_ms() + 60_000)
        assert await signals() == []
        await ahead.wake("t")
        assert await signals() == ["t"]


async def test_a_worker_whose_clock_is_a_moment_behind_gets_at_once_what_is_due(on_postgres: Mailboxes) -> None:
    """Regression: what came from another process, and was told of at once, waited for the worker's next poll."""
    async with on_postgres.open() as (ahead, behind):
        assert isinstance(behind.backend, PostgresBackend)
        behind.backend._offset_ms -= 700
        await ahead.enqueue("t", b"now")
        await ahead.enqueue("later", available_at_ms=ahead.backend.now_ms() + 60_000)
        assert [signal.thread_id for signal in await behind.pull_signals(timeout_s=0)] == ["t"]
        assert await behind.claim("t", "w") is not None
        # It knows the time now. Before, it was told again and again of what it could not claim yet.
        assert abs(behind.backend.now_ms() - ahead.backend.now_ms()) < 500
        behind.backend._offset_ms -= 5_000  # Postgres' clock was set: only sweeps set a worker's
        await query(on_postgres.servers.postgres.dsn, f"UPDATE {on_postgres.name}.mailbox_threads SET wake_at = 0")
        assert len(await behind.pull_signals(timeout_s=0)) == 2
        assert behind.backend.now_ms() < ahead.backend.now_ms() - 4_000


async def test_a_notifier_wakes_a_worker_elsewhere(on_postgres: Mailboxes) -> None:
    dsn, prefix = on_postgres.servers.postgres.dsn, f"bufstore-{on_postgres.name}"
    notifiers = [await PostgresNotifier.open(dsn, prefix=prefix, timeout_s=10) for _ in range(2)]
    stores = [PostgresMailboxStore(dsn, schema=on_postgres.name, pool_size=2, notifier=n) for n in notifiers]
    async with stores[0] as a, stores[1] as b:
        waiting = asyncio.create_task(b.pull_signals(timeout_s=60))

        async def listens() -> bool:
            return isinstance(b.backend, PostgresBackend) and b.backend._idle.listening

        await eventually(listens)
        began = time.monotonic()
        await a.enqueue("t")
        assert [s.thread_id for s in await waiting] == ["t"]
        # The worker's next regular poll was a minute away. A worker that has work does not listen.
        assert time.monotonic() - began < 30
        assert not await listens()
    for notifier in notifiers:
        await notifier.aclose()


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_who_pulls_no_more_takes_no_call_from_others(
    on_postgres: Mailboxes, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: beside an instance whose worker was closed, every other dispatch waited for the next poll."""
    notifier = MemoryNotifier()
    dsn = on_postgres.servers.postgres.dsn
    stores = [PostgresMailboxStore(dsn, schema=on_postgres.name, pool_size=2, notifier=notifier) for _ in range(2)]
    async with stores[0] as a, stores[1] as b:

        async def listens(store: MailboxStore) -> bool:
            return isinstance(store.backend, PostgresBackend) and store.backend._idle.listening

        first = asyncio.create_task(a.pull_signals(timeout_s=60))
        await eventually(lambda: listens(a))
        second = asyncio.create_task(b.pull_signals(timeout_s=60))
        await eventually(lambda: listens(b))
        if how == "cancelled":
            first.cancel()
        else:
            assert isinstance(a.backend, PostgresBackend)

            async def away(limit: int) -> list[Any]:
                raise StoreUnavailable("away")

            monkeypatch.setattr(a.backend, "_pull", away)
            a.backend._news.set()
        assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], BaseException)
        assert not await listens(a)
        began = time.monotonic()
        await b.enqueue("t")
        assert [s.thread_id for s in await second] == ["t"]
        assert time.monotonic() - began < 30
    await notifier.aclose()


async def test_a_live_delivery_without_an_answer_is_enqueued_and_marked(on_nats: Mailboxes) -> None:
    async with on_nats.open(1) as (store,):
        assert isinstance(store.backend, NatsBackend)
        client = store.backend._connection.client()

        async def silent(msg: Any) -> None:
            pass

        await client.subscribe(f"dispatch-live.{on_nats.name}.{token('t')}", cb=silent)
        await client.flush()
        assert await store.deliver_live("t", b"x", timeout_s=0.2) is Live.UNKNOWN
        async with asyncio.timeout(store.config.live_timeout_s):
            assert await store.deliver_live("t", b"x", timeout_s=0) is Live.UNKNOWN
    async with on_nats.open(1, live_timeout_s=0.2) as (store,):
        assert isinstance(store.backend, NatsBackend)
        client = store.backend._connection.client()
        await client.subscribe(f"dispatch-live.{on_nats.name}.{token('t')}", cb=silent)
        await client.flush()
        put = await store.deliver("t", b"x")
        assert put is not None
        assert put.maybe_delivered
        assert await store.load_dispatch("t", put.dispatch_id) == put


async def test_a_worker_that_is_closed_hands_its_work_back(mailboxes: Mailboxes) -> None:
    async with mailboxes.open(1, signal_nack_base_delay_s=0.05) as (store,):
        thread_id, begun = fresh(), asyncio.Event()

        async def handle(_: Any) -> None:
            begun.set()
            await asyncio.sleep(60)

        worker = Worker(store, "w", handle)
        async with worker:
            await store.enqueue(thread_id)
            async with asyncio.timeout(10):
                await begun.wait()
            await worker.aclose(drain_s=0)
        (back,) = await store.list_dispatches(thread_id)
        assert (back.status, back.last_error) == (Status.QUEUED, "the worker was stopped")
        assert await store.claim(thread_id, "another") is not None


async def test_a_mailbox_that_is_not_open_takes_nothing(mailboxes: Mailboxes) -> None:
    """Regression: in memory it worked, so a test passed of what fails in production."""
    async with mailboxes.open(1) as (one,):
        other = mailboxes.store()
        with pytest.raises(Closed):
            await other.enqueue("t", b"x")
        assert await one.list_dispatches("t") == []
        await other.aclose()


@pytest.mark.parametrize("mailboxes", ["memory", "nats"], indirect=True)
async def test_who_has_closed_listens_no_more(mailboxes: Mailboxes) -> None:
    async with mailboxes.open(2) as (a, b):

        async def handle(payload: bytes) -> None: ...

        await b.listen_live("t", handle)
        assert await a.deliver_live("t", b"x") is Live.DELIVERED
        await b.aclose()

        async def nobody() -> bool:
            return await a.deliver_live("t", b"x") is Live.NO_SUBSCRIBER

        await eventually(nobody)


async def test_in_memory_a_live_handler_that_stops_its_own_listener_goes_on_to_its_end() -> None:
    ended = asyncio.Event()
    async with MemoryMailboxStore() as store:

        async def once(_: bytes) -> None:
            await stop()
            await asyncio.sleep(0)
            ended.set()

        stop = await store.listen_live("t", once)
        assert await store.deliver("t", b"x") is None
        async with asyncio.timeout(10):
            await ended.wait()
        assert await store.deliver_live("t", b"x") is Live.NO_SUBSCRIBER
        assert isinstance(store.backend, MemoryBackend)
        assert not store.backend.shared.listeners
