"""Mailboxes in trouble: a full bucket, unreadable records, lost answers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from msgspec.structs import replace

from bufstore import (
    AlreadyExists,
    BufstoreError,
    ConfigError,
    LogFull,
    LogUnavailable,
    MalformedEntry,
    NatsConfig,
    TooLarge,
)
from bufstore.embedded import NatsServer, Servers
from bufstore.jetstream.errors import TooManyResults
from bufstore.jetstream.messages import AppendUnknown, Outgoing
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subject_tokens import token
from bufstore.mailbox import (
    Dispatch,
    Interruption,
    MailboxConfig,
    NatsMailboxNames,
    NatsMailboxStore,
    PostgresMailboxStore,
    Status,
    StepUnknown,
    Sweeper,
    Worker,
    nats_sweeps,
)
from bufstore.mailbox.nats import NatsBackend, find_mailbox
from bufstore.mailbox.postgres import PostgresBackend
from bufstore.mailbox.steps import AT_ONCE
from bufstore.notify import MemoryNotifier
from bufstore.postgres.connection import arrays
from helpers import eventually, fresh, query
from mailboxes import Mailboxes


def _nats(store: Any) -> NatsBackend:
    assert isinstance(store.backend, NatsBackend)
    return store.backend


async def test_a_full_bucket_refuses_what_is_new_and_nothing_else(servers: Servers, on_nats: Mailboxes) -> None:
    names = NatsMailboxNames(bucket=on_nats.name, max_bytes=1 << 20)
    config = MailboxConfig(sweep_interval_s=1.0, lease_s=0.001, timeout_s=20.0)
    async with (
        NatsMailboxStore(servers.nats.url, names=names, config=config) as a,
        NatsMailboxStore(servers.nats.url, names=names, config=config) as b,
    ):
        put: list[str] = []

        async def fill(store: NatsMailboxStore) -> None:
            while True:
                try:
                    put.append((await store.enqueue(fresh(), b"x" * 4000)).thread_id)
                except LogFull:
                    return

        await asyncio.gather(*(fill(store) for store in (a, b) for _ in range(8)))
        assert len(put) > 100
        # One lease is not ended; all other dispatches are worked off.

        async def work_off(n: int, thread_id: str) -> None:
            claim = await (a, b)[n % 2].claim(thread_id, "w")
            assert claim is not None
            if n:
                await a.ack(await b.extend_lease(claim, lease_s=30))

        await asyncio.gather(*(work_off(n, thread_id) for n, thread_id in enumerate(put)))
        assert [d.thread_id for d in await a.reclaim_expired(now_ms=a.backend.now_ms() + 10_000)] == put[:1]
        assert await Sweeper(b).sweep()
        with pytest.raises(LogFull):
            await a.enqueue(fresh(), b"x" * 100_000)
        assert await b.purge_finished(int(1000 * time.time()) + 60_000) == len(put) - 1
        await asyncio.sleep(0.3)  # a full bucket is not tried again for 0.2 seconds
        await a.enqueue(fresh(), b"x" * 100_000)


async def test_a_step_goes_on_when_others_held_the_last_room_for_a_moment(
    on_nats: Mailboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of another instance that are in flight count until they are stored or refused."""
    async with on_nats.open(1) as (store,):
        backend, thread_id, refused = _nats(store), fresh(), 0
        await store.enqueue(thread_id)
        publish = backend._stream.publish_batch

        async def full(*_: Any) -> int:
            raise LogFull("maximum bytes exceeded")

        async def full_at_first(*arguments: Any) -> int:
            nonlocal refused
            refused += 1
            return await (full(*arguments) if refused < 3 else publish(*arguments))

        monkeypatch.setattr(backend._bucket.writes, "submit", full)
        monkeypatch.setattr(backend._stream, "publish_batch", full_at_first)
        claim = await store.claim(thread_id, "w")
        assert claim is not None
        assert refused == 3


async def test_what_is_taken_can_be_claimed_and_taken_back_however_large(
    on_nats: Mailboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a claim's record is larger than the queued one: the server refused each, and the thread stood."""
    monkeypatch.setattr(NatsStream, "message_bytes_max", 64 << 10)
    async with on_nats.open(1) as (store,):
        thread_id, holder, t = fresh(), "h" * 1000, store.backend.now_ms()

        async def largest(put: Callable[[bytes], Awaitable[Dispatch]]) -> Dispatch:
            size = 64 << 10
            while True:
                with suppress(TooLarge):
                    return await put(bytes(size))
                size -= 100

        put = await largest(lambda payload: store.enqueue(thread_id, payload, now_ms=t))
        assert len(put.payload) > 50_000
        for result in (False, True):
            claim = await store.claim(thread_id, holder, now_ms=t)
            assert claim is not None
            claim = await store.record_start(claim, holder, now_ms=t)
            if result:
                await store.record_result(claim, "done", now_ms=t)
            t += 60_000
            assert [d.status for d in await store.reclaim_expired(now_ms=t)] == [Status.QUEUED]
        small = await store.enqueue(thread_id, priority=1, now_ms=t)
        claim = await store.claim(thread_id, holder, now_ms=t)
        assert claim is not None
        assert claim.dispatch_id == small.dispatch_id
        await largest(lambda result: store.record_result(claim, "done", result=result, now_ms=t))
        assert [d.status for d in await store.reclaim_expired(now_ms=t + 60_000)] == [Status.QUEUED]
        claim = await store.claim(thread_id, holder, now_ms=t + 60_000)
        assert claim is not None
        await store.ack(claim)
        claim = await store.claim(thread_id, holder)
        assert claim is not None
        assert claim.dispatch_id == put.dispatch_id
        for length in (26_000, 8100):
            back = await store.nack(claim, error=("an error with a long text " * 1000)[:length])
            assert (back.status, (back.last_error or "")[:26]) == (Status.QUEUED, "an error with a long text ")
            claim = await store.claim(thread_id, holder)
            assert claim is not None


async def test_a_server_that_takes_small_messages_only_has_a_mailbox_for_small_ones(
    on_nats: Mailboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: nothing was small enough, because of what was kept for a claim's words."""
    monkeypatch.setattr(NatsStream, "message_bytes_max", 8 << 10)
    async with on_nats.open(1) as (store,):
        await store.enqueue("t", b"x" * 4000)
        claim = await store.claim("t", "me")
        assert claim is not None
        await store.record_result(claim, "done", result=b"ok")
        await store.ack(claim)


async def test_an_end_far_in_the_future_keeps_nothing_behind_it(on_nats: Mailboxes) -> None:
    """Regression: after the server's clock had once been ahead nothing was purged any more, and the bucket got full."""
    async with on_nats.open(1) as (store,):
        thread_id, year_ms = fresh(), 365 * 86400_000
        put = [await store.enqueue(thread_id) for _ in range(3)]
        for ahead_ms in (0, year_ms, 0):
            claim = await store.claim(thread_id, "w")
            assert claim is not None
            await store.ack(claim, now_ms=store.backend.now_ms() + ahead_ms)
        await store.purge_finished(store.backend.now_ms() + 1)
        assert await store.load_dispatch(thread_id, put[2].dispatch_id) is None


async def test_what_ends_while_a_purge_runs_stays(on_nats: Mailboxes) -> None:
    """Regression: it had ended behind the time that was given, and behind the purge's own: so it was of the future."""
    async with on_nats.open(1) as (store,):
        thread_id, before = fresh(), store.backend.now_ms()
        put = await store.enqueue(thread_id)
        claim = await store.claim(thread_id, "w")
        assert claim is not None
        await store.ack(claim, now_ms=before + 60_000)
        assert await store.purge_finished(before) == 0
        assert await store.load_dispatch(thread_id, put.dispatch_id) is not None


async def test_a_thread_that_nobody_can_read_fails_no_purge(on_nats: Mailboxes) -> None:
    """Regression: one foreign message in a thread's place made purges raise."""
    async with on_nats.open(1) as (store,):
        thread_id = fresh()
        await store.enqueue(thread_id)
        claim = await store.claim(thread_id, "w")
        assert claim is not None
        await store.ack(claim)
        await _nats(store)._bucket.put([Outgoing(_nats(store)._keys.thread(thread_id), b"\xc1")])
        assert await store.purge_finished(store.backend.now_ms() + 60_000) == 1


async def test_what_left_the_queue_before_its_time_leaves_no_date(on_nats: Mailboxes) -> None:
    """Regression: the date of a cancelled dispatch stayed in the bucket until then, and took room from all others."""
    async with on_nats.open(1) as (store,):
        thread_id, later = fresh(), store.backend.now_ms() + 365 * 86400_000
        first, second = [await store.enqueue(thread_id, available_at_ms=later) for _ in range(2)]
        dates = _nats(store)._keys.of("d", ">")
        assert len(await _nats(store)._bucket.all(dates)) == 2
        assert await store.cancel(thread_id, first.dispatch_id) is not None
        assert [d.dispatch_id for d in (await store.interrupt(thread_id)).superseded] == [second.dispatch_id]
        assert await _nats(store)._bucket.all(dates) == []


async def test_an_interrupted_purge_leaves_no_thread_on_postgres(on_postgres: Mailboxes) -> None:
    """Regression: its row stayed for ever when the purge was broken off behind its last dispatch."""
    async with on_postgres.open(1) as (store,):
        await store.enqueue("t")
        claim = await store.claim("t", "w")
        assert claim is not None
        await store.ack(claim)
        backend: Any = store.backend
        statement, backend._sql["purge_threads"] = backend._sql["purge_threads"], "SELECT 1 / 0, $1::text[]"
        with pytest.raises(psycopg.errors.DivisionByZero):
            await store.purge_finished(store.backend.now_ms() + 1000)
        backend._sql["purge_threads"] = statement
        assert await store.purge_finished(store.backend.now_ms() + 1000) == 1
        left = f"SELECT count(*) FROM {on_postgres.name}.mailbox_threads"
        assert await query(on_postgres.servers.postgres.dsn, left) == [(0,)]


async def test_a_purge_that_stands_still_is_ended(on_postgres: Mailboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it locked its threads for as long as its process stood."""
    rows_of, found = arrays.rows_of, []

    async def watched(connection: Any, statement: Any, parameters: Any) -> list[Any]:
        rows: list[Any] = await rows_of(connection, statement, parameters)
        cursor = await connection.execute("SHOW idle_in_transaction_session_timeout")
        found.extend(await cursor.fetchone())
        return rows

    async with on_postgres.open(1) as (store,):
        await store.enqueue("t")
        claim = await store.claim("t", "w")
        assert claim is not None
        await store.ack(claim)
        with monkeypatch.context() as patched:
            patched.setattr(arrays, "rows_of", watched)
            assert await store.purge_finished(store.backend.now_ms() + 1000) == 1
    assert found == ["10s", "10s"]


async def test_an_interrupted_purge_takes_no_id_away(on_nats: Mailboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a purged dispatch's id stayed taken for ever when the purge could not remove its key."""
    async with on_nats.open(1) as (store,):
        thread_id = fresh()
        await store.enqueue(thread_id, b"first", dispatch_id="d", dedupe_key="k")
        claim = await store.claim(thread_id, "w")
        assert claim is not None

        async def interrupted(*_: Any) -> None:
            await purge(*_)
            raise LogUnavailable("away")

        with pytest.raises(AlreadyExists):
            await store.enqueue(thread_id, b"second", dispatch_id="d")
        await store.ack(claim)
        with pytest.raises(AlreadyExists):
            await store.enqueue(thread_id, b"second", dispatch_id="d")
        with monkeypatch.context() as patched:
            stream = _nats(store)._bucket.stream
            purge = stream.purge
            patched.setattr(stream, "purge", interrupted)
            with pytest.raises(LogUnavailable):
                await store.purge_finished(store.backend.now_ms() + 1000)
        assert await store.load_dispatch(thread_id, "d") is None
        again = await store.enqueue(thread_id, b"second", dispatch_id="d", dedupe_key="k")
        assert (again.dispatch_id, again.payload) == ("d", b"second")


@pytest.mark.parametrize("when", ["before", "behind", "full"])
async def test_an_interrupted_purge_leaves_no_keys_on_nats(
    when: str, on_nats: Mailboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: broken off behind the purge of records, it left their keys and threads in the bucket for ever."""
    async with on_nats.open(1) as (store,):
        thread_id, backend = fresh(), _nats(store)
        await store.enqueue(thread_id, dispatch_id="d", dedupe_key="k", priority=3)
        claim = await store.claim(thread_id, "w")
        assert claim is not None
        await store.ack(claim)
        bucket, t = backend._bucket, token(thread_id)
        purge, put_each = bucket.stream.purge, bucket.put_each
        records: list[int] = []

        async def interrupted(*_: Any) -> None:
            if when == "behind":
                await purge(*_)
            raise LogUnavailable("away")

        async def full(messages: Any, **how: Any) -> set[str]:
            records.append(len(await bucket.all(backend._keys.of("x", t, "*"))))
            if records[-1]:
                raise LogFull("full")
            return await put_each(messages, **how)

        with monkeypatch.context() as patched:
            if when == "full":
                patched.setattr(bucket, "put_each", full)
                assert await store.purge_finished(store.backend.now_ms() + 1000) == 1
            else:
                patched.setattr(bucket.stream, "purge", interrupted)
                with pytest.raises(LogUnavailable):
                    await store.purge_finished(store.backend.now_ms() + 1000)
        await store.purge_finished(store.backend.now_ms() + 1000)
        for key in (f"i.{t}", f"k.{t}", f"x.{t}", f"p.{t}"):
            assert await bucket.all(backend._keys.of(key, "*")) == []
        left = await bucket.last([backend._keys.thread(thread_id)])
        assert [m.body for m in left.values()] == [b""]


@pytest.mark.parametrize("kind", ["i", "k", "p", "t"])
async def test_a_key_whose_removal_is_not_answered_is_removed_by_the_next_purge(
    kind: str, on_nats: Mailboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the record was purged all the same, and nothing led to the key any more."""
    async with on_nats.open(1) as (store,):
        thread_id, bucket, keys = fresh(), _nats(store)._bucket, _nats(store)._keys
        await store.enqueue(thread_id, dispatch_id="d", dedupe_key="k", priority=3)
        claim = await store.claim(thread_id, "w")
        assert claim is not None
        await store.ack(claim)
        put = bucket.put

        async def lost(messages: Any, *rest: Any, **how: Any) -> int:
            if any(keys.kind(m.subject) == kind for m in messages):
                raise AppendUnknown("no answer")
            return await put(messages, *rest, **how)

        with monkeypatch.context() as patched:
            patched.setattr(bucket, "put", lost)
            assert await store.purge_finished(store.backend.now_ms() + 1000) == 0
        assert await store.purge_finished(store.backend.now_ms() + 1000) == 1
        t = token(thread_id)
        for each in (f"i.{t}", f"k.{t}", f"x.{t}", f"p.{t}"):
            assert await bucket.all(keys.of(each, "*")) == []
        assert [m.body for m in (await bucket.last([keys.thread(thread_id)])).values()] == [b""]


async def test_a_purge_goes_on_where_another_one_has_removed_a_key(
    on_nats: Mailboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: that counted as a removal without an answer, and of two purges at once both ended, with all left."""
    async with on_nats.open(2) as (one, two):
        await _finished(one, fresh())
        bucket = _nats(one)._bucket
        put_each = bucket.put_each

        async def late(messages: Any, **how: Any) -> Any:
            messages = list(messages)
            if messages:
                await _nats(two)._bucket.put(messages[:1])  # the other purge was faster
            return await put_each(messages, **how)

        monkeypatch.setattr(bucket, "put_each", late)
        assert await one.purge_finished(one.backend.now_ms() + 1000) > 0


async def test_a_thread_that_is_written_to_as_it_is_purged_is_forgotten_all_the_same(
    on_nats: Mailboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the answer to a signal, which leads no purge there, kept its key for good."""
    async with on_nats.open(1) as (store,):
        thread_id = fresh()
        await _finished(store, thread_id)
        bucket, key = _nats(store)._bucket, _nats(store)._keys.thread(thread_id)
        put_each, times = bucket.put_each, 0

        async def late(messages: Any, **how: Any) -> Any:
            nonlocal times
            messages = list(messages)
            if any(m.subject == key for m in messages):
                times += 1
                there = (await bucket.last([key]))[key]
                if times == 1:
                    await bucket.put([Outgoing(key, there.body, expected=there.seq)])
            return await put_each(messages, **how)

        monkeypatch.setattr(bucket, "put_each", late)
        assert await store.purge_finished(store.backend.now_ms() + 1000) > 0
        assert times == 2
        assert [m.body for m in (await bucket.last([key])).values()] == [b""]


async def _finished(store: Any, thread_id: str) -> None:
    await store.enqueue(thread_id, b"first", dispatch_id="d", dedupe_key="k")
    claim = await store.claim(thread_id, "w")
    assert claim is not None
    await store.ack(claim)


@pytest.mark.parametrize("full", [False, True])
async def test_a_purge_leaves_the_keys_of_a_dispatch_that_takes_an_id_meanwhile(
    full: bool, on_nats: Mailboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the id was free again while the new dispatch had it, and a third one with it was lost."""
    async with on_nats.open(2) as (store, other):
        thread_id, bucket = fresh(), _nats(store)._bucket
        purge, put_each = bucket.stream.purge, bucket.put_each
        await _finished(store, thread_id)
        is_full = full

        async def put(messages: Any, **how: Any) -> set[str]:
            if is_full:
                raise LogFull("full")
            return await put_each(messages, **how)

        async def purging(subject: str, up_to: int) -> None:
            nonlocal is_full
            await purge(subject, up_to)
            if ".x." in subject:
                is_full = False
                await other.enqueue(thread_id, b"second", dispatch_id="d", dedupe_key="k")

        monkeypatch.setattr(bucket, "put_each", put)
        monkeypatch.setattr(bucket.stream, "purge", purging)
        await store.purge_finished(store.backend.now_ms() + 1000)
        with pytest.raises(AlreadyExists):
            await other.enqueue(thread_id, b"third", dispatch_id="d")
        with pytest.raises(AlreadyExists):
            await other.enqueue(thread_id, b"third", dedupe_key="k")
        claim = await other.claim(thread_id, "w")
        assert claim is not None and claim.payload == b"second"


async def test_a_purge_makes_room_in_a_full_bucket_at_once(on_nats: Mailboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it tried for five seconds to remove the keys before it removed the records."""
    async with on_nats.open(1) as (store,):
        stream = _nats(store)._bucket.stream
        await _finished(store, fresh())
        purge, tried, room = stream.purge, list[str](), False

        def while_full(write: Callable[..., Any], about: Callable[[Any], list[str]]) -> Callable[..., Any]:
            async def refused(messages: Any, *rest: Any) -> Any:
                if room:
                    return await write(messages, *rest)
                tried.extend(about(messages))
                raise LogFull("full")

            return refused

        async def purging(subject: str, up_to: int) -> None:
            nonlocal room
            await purge(subject, up_to)
            room = room or ".x." in subject

        monkeypatch.setattr(stream, "publish", while_full(stream.publish, lambda m: [m.subject]))
        for name in ("publish_each", "publish_batch"):
            refused = while_full(getattr(stream, name), lambda messages: [m.subject for m in messages])
            monkeypatch.setattr(stream, name, refused)
        monkeypatch.setattr(stream, "purge", purging)
        assert await store.purge_finished(store.backend.now_ms() + 1000) == 1
        assert tried and len(tried) == len(set(tried))


async def test_a_record_that_nobody_can_read_is_set_aside_on_nats(on_nats: Mailboxes) -> None:
    async with on_nats.open(2, keep_finished_s=0.001) as (store, other):
        backend, thread_id, done = _nats(store), fresh(), fresh()
        t = token(thread_id)
        of = backend._keys.of
        await store.enqueue(done)
        garbage = [
            of("q", t, "128", "first"),
            of("r", t, "returned"),
            of("x", t, "ended"),
            of("l", "abc", "x"),
            of("l", "5", "x.y"),
            of("d", "5", "!"),
            of("t", "!!"),
            of("t", token("another")),
            of("s", "!"),
        ]
        for subject in garbage:
            await backend._bucket.put([Outgoing(subject, b"\xc1 not ours")])
        claim = await store.claim(done, "w")
        assert claim is not None
        await store.ack(claim)
        good = await store.enqueue(thread_id, b"good")
        assert [d.thread_id for d in await store.list_finished()] == [done]
        assert (await other.count_by_status())[Status.QUEUED] == 1
        assert await other.queued_thread_ids() == [thread_id]
        assert [d.payload for d in await other.list_dispatches(thread_id)] == [b"good"]
        sweeper = Sweeper(other)

        async def purged() -> bool:
            await sweeper.sweep()
            return not await store.list_finished()

        await eventually(purged)
        claim = await other.claim(thread_id, "w")
        assert claim is not None
        assert claim.dispatch_id == good.dispatch_id
        await other.ack(claim)
        assert (await store.interrupt(thread_id)).superseded == []
        with pytest.raises(MalformedEntry):
            await store.claim("another", "w")


async def test_many_long_ids_of_one_tenant_keep_no_other_from_its_work(on_nats: Mailboxes) -> None:
    """A pass asked for the threads of all ended dispatches at once, in one request, which the server did not take."""
    async with on_nats.open(1) as (mailbox,):
        long = [f"{n:04}".ljust(1024, "x") for n in range(900)]
        some = asyncio.Semaphore(32)

        async def work(thread_id: str, *, done: bool) -> None:
            async with some:
                await mailbox.enqueue(thread_id, b"x")
                if done:
                    claim = await mailbox.claim(thread_id, "w")
                    assert claim is not None
                    await mailbox.ack(claim)

        await asyncio.gather(*(work(thread_id, done=True) for thread_id in long))
        victim = await mailbox.enqueue("victim", b"x")
        assert await mailbox.claim("victim", "dies", lease_s=0.5) is not None
        await asyncio.gather(*(work(thread_id, done=False) for thread_id in long[:800]))
        sweeper = Sweeper(mailbox)

        async def reclaimed() -> bool:
            await sweeper.sweep()
            found = await mailbox.load_dispatch("victim", victim.dispatch_id)
            return found is not None and found.status is Status.QUEUED

        await eventually(reclaimed, 20)
        assert sweeper.trouble is None
        assert len(await mailbox.queued_thread_ids(limit=1000)) == 801


async def test_signals_that_belong_to_no_thread_take_no_places(servers: Servers) -> None:
    """They came again and again, and as many as may be unanswered stopped everybody."""
    names = NatsMailboxNames(bucket=f"m{fresh().replace('-', '_')}", max_bytes=64 << 20, signals_pending_max=2)
    async with NatsMailboxStore(servers.nats.url, names=names) as mailbox:
        backend = _nats(mailbox)
        for n in range(4):
            await backend._bucket.put([Outgoing(backend._keys.of("s", f"!{n}"), b"not ours")])
        await mailbox.enqueue("t", b"x")

        async def pulled() -> bool:
            return [s.thread_id for s in await mailbox.pull_signals(10)] == ["t"]

        await eventually(pulled, 20)


async def test_a_record_that_nobody_can_read_is_set_aside_on_postgres(on_postgres: Mailboxes) -> None:
    dsn = on_postgres.servers.postgres.dsn
    async with on_postgres.open(2, keep_finished_s=0.001) as (store, other):
        bad, expired, ended, good = fresh(), fresh(), fresh(), fresh()
        for thread_id in (bad, expired, ended):
            await store.enqueue(thread_id)
        behind = await store.enqueue(bad, b"behind")
        assert await store.claim(expired, "w", lease_s=0.001) is not None
        claim = await store.claim(ended, "w")
        assert claim is not None
        await store.ack(claim)
        await query(
            dsn,
            f"UPDATE {on_postgres.name}.mailbox_dispatches SET record = '\\xc1' WHERE thread_id <> '{bad}' "
            f"OR dispatch_id <> '{behind.dispatch_id}'",
        )
        await store.enqueue(good)
        assert await store.claim(good, "w", lease_s=0.001) is not None
        await asyncio.sleep(0.01)
        # A readable record is reclaimed although another is unreadable.
        later = other.backend.now_ms() + 10_000  # the clocks of two instances may differ on a busy machine
        assert [d.thread_id for d in await other.reclaim_expired(now_ms=later)] == [good]
        claim = await other.claim(bad, "w")
        assert claim is not None
        assert claim.dispatch_id == behind.dispatch_id
        assert [d.payload for d in await store.list_dispatches(bad)] == [b"behind"]
        await store.list_finished()
        await store.interrupt(bad)
        assert await Sweeper(other).sweep()
        await store.enqueue(expired, b"next")
        claim = await store.claim(expired, "w")
        assert claim is not None
        assert claim.payload == b"next"


async def test_a_superseded_record_that_nobody_can_read_blocks_no_thread_on_postgres(on_postgres: Mailboxes) -> None:
    """Regression: each claim behind the interrupt failed with MalformedEntry."""
    async with on_postgres.open(1) as (store,):
        thread_id = fresh()
        for _ in range(2):
            await store.enqueue(thread_id)
        await query(
            on_postgres.servers.postgres.dsn,
            f"UPDATE {on_postgres.name}.mailbox_dispatches SET record = '\\xc1' WHERE thread_id = '{thread_id}'",
        )
        await store.interrupt(thread_id)
        later = await store.enqueue(thread_id)
        claim = await store.claim(thread_id, "w")
        assert claim is not None
        assert claim.dispatch_id == later.dispatch_id


async def test_large_dispatches_are_superseded_in_a_full_bucket(servers: Servers, on_nats: Mailboxes) -> None:
    """Regression: a hundred went at once, for which there was no room, and the thread stood still."""
    names = NatsMailboxNames(bucket=on_nats.name, max_bytes=16 << 20)
    async with NatsMailboxStore(servers.nats.url, names=names, config=MailboxConfig(timeout_s=20.0)) as store:
        thread_id, count = fresh(), 0
        with contextlib.suppress(LogFull):
            for count in range(1000):  # noqa: B007
                await store.enqueue(thread_id, b"x" * (128 << 10))
        assert count > 80
        done = await store.interrupt(thread_id)
        assert (done.complete, len(done.superseded)) == (True, count)
        assert await store.claim(thread_id, "w") is None


async def test_a_plain_enqueue_whose_answer_is_lost_is_done_once(mailboxes: Mailboxes) -> None:
    async with mailboxes.open(1, timeout_s=30.0) as (store,):
        thread_id, add = fresh(), store.backend.add

        async def lost(*args: Any, **options: Any) -> Any:
            store.backend.add = add  # type: ignore[method-assign]
            await add(*args, **options)
            raise AppendUnknown("lost on its way back")

        store.backend.add = lost  # type: ignore[method-assign]
        put = await store.enqueue(thread_id, b"x")
        assert await store.list_dispatches(thread_id) == [put]

        async def lost_and_worked_off(*args: Any, **options: Any) -> Any:
            store.backend.add = add  # type: ignore[method-assign]
            await add(*args, **options)
            for _ in range(2):
                claim = await store.claim(thread_id, "w")
                assert claim is not None
                await store.ack(claim)
            await asyncio.sleep(1.5)  # a removal's tombstone on NATS has expired
            raise AppendUnknown("lost on its way back")

        store.backend.add = lost_and_worked_off  # type: ignore[method-assign]
        await store.enqueue(thread_id, b"y")
        assert [d.status for d in await store.list_dispatches(thread_id)] == [Status.ACKED] * 2


async def test_an_enqueue_of_unknown_end_names_whom_to_ask_for(servers: Servers) -> None:
    async with Mailboxes("memory", servers).open(1, timeout_s=0.2) as (store,):

        async def lost(*_: Any, **__: Any) -> Any:
            raise AppendUnknown("lost")

        add, store.backend.add = store.backend.add, lost  # type: ignore[method-assign]
        with pytest.raises(StepUnknown) as caught:
            await store.enqueue("t")
        assert caught.value.dispatch_id is not None
        assert await store.load_dispatch("t", caught.value.dispatch_id) is None
        store.backend.add = add  # type: ignore[method-assign]


async def test_an_interrupt_ends_in_time_and_says_how_far_it_came(mailboxes: Mailboxes) -> None:
    async with mailboxes.open(2, timeout_s=5.0) as (store, other):
        thread_id = fresh()
        await asyncio.gather(*(store.enqueue(thread_id) for _ in range(250)))
        queued, calls = store.backend.queued, 0

        async def fails(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise AppendUnknown("no answer")
            return await queued(*args)

        store.backend.queued = fails  # type: ignore[method-assign]
        done = await store.interrupt(thread_id)
        assert not done.complete
        assert len(done.superseded) == 100
        store.backend.queued = queued  # type: ignore[method-assign]
        assert {d.status for d in await other.list_dispatches(thread_id, limit=1000)} == {Status.SUPERSEDED}
        # The next claim removes the rest, and a later enqueue comes first.
        after = await other.enqueue(thread_id)
        claim = await other.claim(thread_id, "w")
        assert claim is not None
        assert claim.dispatch_id == after.dispatch_id
        assert (await other.interrupt(thread_id)).superseded == []
        assert (await other.interrupt(thread_id)).complete


async def test_an_interrupt_of_a_thread_with_nothing_keeps_nothing(mailboxes: Mailboxes) -> None:
    """Regression: each kept the thread for ever. On NATS they filled the bucket: no work could be acked or claimed."""
    async with mailboxes.open() as (store, other):
        new, purged = fresh(), fresh()
        await store.enqueue(purged)
        assert (await other.interrupt(purged)).epoch > 0
        assert await store.purge_finished(store.backend.now_ms() + 60_000) == 1
        for thread_id in (new, purged):
            assert await other.interrupt(thread_id) == Interruption(epoch=0, active=None, superseded=[])
            assert await store.current_epoch(thread_id) == 0
        waiting = await store.enqueue(new, available_at_ms=store.backend.now_ms() + 3600_000)
        done = await other.interrupt(new)
        assert [d.dispatch_id for d in done.superseded] == [waiting.dispatch_id]
        assert await store.current_epoch(new) == done.epoch > 0


async def test_an_interrupt_is_complete_only_when_nothing_superseded_is_left(on_nats: Mailboxes) -> None:
    """Messages that a killed server brought back and later enqueues do not hide the dispatches behind them."""
    async with on_nats.open(3) as (store, other, slow):
        thread_id, backend = fresh(), _nats(store)
        ended = await asyncio.gather(*(store.enqueue(thread_id) for _ in range(AT_ONCE)))
        while (claim := await store.claim(thread_id, "w")) is not None:
            await store.ack(claim)
        for d in ended:  # as a server does that is killed after the tombstones have expired
            await backend._bucket.put(
                [Outgoing(backend._keys.queued(d), msgspec.msgpack.encode(replace(d, position=0)))]
            )
        queued = [await store.enqueue(thread_id) for _ in range(3)]
        assert (await other.count_by_status())[Status.QUEUED] == len(queued)
        done = await other.interrupt(thread_id)
        assert done.complete
        assert sorted(d.dispatch_id for d in done.superseded) == sorted(d.dispatch_id for d in queued)
        # An enqueue that read the thread before the interrupt is stored after it, behind others.
        seen, go_on, write = asyncio.Event(), asyncio.Event(), _nats(slow)._bucket.put

        async def later(*arguments: Any) -> int:
            seen.set()
            await go_on.wait()
            return await write(*arguments)

        _nats(slow)._bucket.put = later  # type: ignore[method-assign]
        late = asyncio.create_task(slow.enqueue(thread_id))
        await seen.wait()
        look = backend.queued

        async def first(*args: Any) -> Any:
            backend.queued = look  # type: ignore[method-assign]
            await asyncio.gather(*(other.enqueue(thread_id) for _ in range(AT_ONCE)))
            go_on.set()
            await late
            return await look(*args)

        backend.queued = first  # type: ignore[method-assign]
        done = await store.interrupt(thread_id)
        assert done.complete
        assert [d.dispatch_id for d in done.superseded] == [late.result().dispatch_id]


async def test_an_id_that_is_used_again_while_its_record_is_purged_is_kept(mailboxes: Mailboxes) -> None:
    async with mailboxes.open(1) as (store,):
        thread_id = fresh()
        for n in range(3):
            put: list[str] = []

            async def again(put: list[str] = put) -> None:
                while not put:
                    try:
                        put.append((await store.enqueue(thread_id, dispatch_id="own", dedupe_key="k")).dispatch_id)
                    except AlreadyExists:
                        await asyncio.sleep(0)

            if n:
                enqueueing = asyncio.create_task(again())
                while not enqueueing.done():  # a purge leaves out a thread in whose row an enqueue is at work
                    await store.purge_finished(int(1000 * time.time()) + 60_000)
                    await asyncio.sleep(0)
                await enqueueing
                await store.purge_finished(int(1000 * time.time()) + 60_000)
            else:
                await again()
            claim = await store.claim(thread_id, "w")
            assert claim is not None
            assert claim.dispatch_id == "own"
            await store.ack(claim)


async def test_a_notifier_that_is_closed_or_hangs_fails_no_stored_enqueue(on_postgres: Mailboxes) -> None:
    notifier = MemoryNotifier()
    dsn = on_postgres.servers.postgres.dsn
    async with PostgresMailboxStore(dsn, schema=on_postgres.name, pool_size=2, notifier=notifier) as store:
        told = asyncio.Event()

        async def hangs(kind: str, count: int = 1) -> None:
            told.set()
            await asyncio.Event().wait()

        notify, notifier.notify_scheduled = notifier.notify_scheduled, hangs  # type: ignore[method-assign]
        async with asyncio.timeout(5):
            for _ in range(3):
                await store.enqueue("t")
            await told.wait()
        notifier.notify_scheduled = notify  # type: ignore[method-assign]
        await notifier.aclose()
        await store.enqueue("t")
        claim = await store.claim("t", "w")
        assert claim is not None
        await store.nack(claim)
        assert len(await store.list_dispatches("t")) == 4


async def test_what_a_killed_server_brought_back_hides_nothing_behind_it(on_nats: Mailboxes) -> None:
    async with on_nats.open() as (a, b):
        thread_id, backend = fresh(), _nats(b)
        ended = [await a.enqueue(thread_id) for _ in range(7)]
        for _ in ended:
            claim = await a.claim(thread_id, "w")
            assert claim is not None
            await a.ack(claim)
        await _brought_back(backend, ended)
        wanted = await a.enqueue(thread_id)
        (signal,) = await a.pull_signals(timeout_s=5)
        claim = await b.claim(thread_id, "w")
        assert claim is not None
        assert claim.dispatch_id == wanted.dispatch_id
        await b.ack(claim)
        assert await signal.ack()
        assert await a.queued_thread_ids() == []


async def _brought_back(backend: NatsBackend, left: list[Dispatch]) -> None:
    """Store ended dispatches in the queue again, as a killed nats-server does: see ADR 13."""
    for d in left:
        await backend._bucket.put([Outgoing(backend._keys.queued(d), msgspec.msgpack.encode(replace(d, position=0)))])


async def test_a_turn_to_sweep_on_nats_ends_before_the_next_pass(
    on_nats: Mailboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it lasted a whole interval, so a lone sweeper, which waits 0.9 to 1.1 of it, missed many passes."""
    async with on_nats.open(1) as (store,):
        put, turns = _nats(store)._bucket.put_each, list[Outgoing]()

        async def put_each(messages: Any) -> Any:
            turns.extend(messages := list(messages))
            return await put(messages)

        monkeypatch.setattr(_nats(store)._bucket, "put_each", put_each)
        assert await store.backend.sweeps(10.0)
        assert [m.ttl_s for m in turns] == [5]


@pytest.mark.parametrize("many", [False, True])
async def test_a_dispatch_that_is_claimed_as_others_are_counted_is_counted(
    on_nats: Mailboxes, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    """Regression: it was in none of the places when they were read: `bufstore mailbox list` did not show it."""
    async with on_nats.open(2) as (store, other):
        thread_id, bucket = fresh(), _nats(store)._bucket
        for _ in range(3):
            await store.enqueue(thread_id)
        read, claims = bucket.all, list[Dispatch | None]()

        async def all_(subject: str, limit: int | None = None) -> Any:
            if not claims and ".q." in subject:
                claims.append(await other.claim(thread_id, "w"))
            return await read(subject, limit)

        async def too_many(*_: Any) -> Any:
            raise TooManyResults("more than 1024")

        monkeypatch.setattr(bucket, "all", all_)
        if many:
            last = bucket.last
            monkeypatch.setattr(bucket, "last", lambda s: too_many() if len(s) > 1 else last(s))
            listed = await store.list_dispatches(thread_id)
            found = {status: [d.status for d in listed].count(status) for status in (Status.QUEUED, Status.CLAIMED)}
        else:
            found = await store.count_by_status()
        assert len(claims) == 1
        assert (found[Status.QUEUED], found[Status.CLAIMED]) == (2, 1)


async def test_what_a_killed_server_brought_back_is_not_counted_as_queued(on_nats: Mailboxes) -> None:
    async with on_nats.open(1) as (store,):
        long_ago, busy, waiting = store.backend.now_ms() - 3600_000, fresh(), fresh()
        ended = [await store.enqueue(fresh(), now_ms=long_ago) for _ in range(20)]
        for d in ended:
            await store.cancel(d.thread_id, d.dispatch_id)
        claimed = await store.enqueue(busy, now_ms=long_ago)
        assert await store.claim(busy, "w") is not None
        superseded = await store.enqueue(fresh(), now_ms=long_ago)
        await store.interrupt(superseded.thread_id)
        await _brought_back(_nats(store), [*ended, claimed, superseded])
        assert await store.queued_thread_ids() == []
        assert (await store.gauges()).oldest_queued_s is None
        await store.enqueue(waiting)
        assert await store.queued_thread_ids() == [waiting]
        oldest_s = (await store.gauges()).oldest_queued_s
        assert oldest_s is not None
        assert oldest_s < 60


@pytest.mark.long
async def test_a_store_that_was_away_for_a_moment_delays_no_thread_for_long(
    mailboxes: Mailboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal whose thread was busy for long comes every 30 s; a store's failure must not count as a busy thread."""
    async with mailboxes.open(1) as (store,):
        thread_id, done, claim = fresh(), asyncio.Event(), store.claim
        await store.enqueue(thread_id)
        for _ in range(8):
            (signal,) = await store.pull_signals(timeout_s=5)
            await signal.nack(0)

        async def away(*_: Any) -> None:
            monkeypatch.setattr(store, "claim", claim)
            raise LogUnavailable("away")

        async def handle(_: Dispatch) -> None:
            done.set()

        monkeypatch.setattr(store, "claim", away)
        async with Worker(store, "w", handle), asyncio.timeout(20):
            await done.wait()


async def test_a_copy_that_does_not_know_of_a_claim_yet_ends_no_work(
    mailboxes: Mailboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether claims are still held may be read from a copy that lags behind the leader which stored the claim."""
    async with mailboxes.open(1) as (store,):
        thread_id, looked, done = fresh(), asyncio.Event(), asyncio.Event()
        await store.enqueue(thread_id)
        earlier = await store.claim(thread_id, "another")
        assert earlier is not None
        await store.ack(earlier)
        before = await store.backend.held([thread_id])
        looks: list[int] = []

        async def behind(_: Any) -> dict[str, tuple[int, int, int]]:
            looks.append(1)
            if len(looks) == 2:
                looked.set()
            return before

        async def handle(_: Dispatch) -> None:
            await looked.wait()
            done.set()

        monkeypatch.setattr(store.backend, "held", behind)
        await store.enqueue(thread_id)
        async with Worker(store, "w", handle), asyncio.timeout(20):
            await done.wait()
        counts = store.statistics().counts
        assert counts["acked"] == 2
        assert counts["work_lost"] == 0


async def test_a_signal_that_nobody_answers_is_followed_by_a_new_one(on_nats: Mailboxes) -> None:
    """A signal may go astray several times, and each time it would come again only after 30 s."""
    config = {"signal_ack_wait_s": 1.0, "signal_nack_max_delay_s": 5.0, "sweep_interval_s": 0.5}
    async with on_nats.open(1, **config) as (store,):
        free, busy = fresh(), fresh()
        for thread_id in (free, busy):
            await store.enqueue(thread_id)
        assert await store.claim(busy, "another", lease_s=60) is not None
        sweeper, came = Sweeper(store), list[tuple[str, int, int]]()

        async def is_new() -> bool:
            await sweeper.sweep()
            for signal in await store.pull_signals(timeout_s=0.1):
                came.append((signal.thread_id, signal.mark.seq, signal.deliveries))
            return len({seq for thread_id, seq, _ in came if thread_id == free}) > 1

        await eventually(is_new, 30)
        assert max(times for thread_id, _, times in came if thread_id == free) > 1
        assert len({seq for thread_id, seq, _ in came if thread_id == busy}) == 1
        assert store.statistics().counts["resignalled"] == 1


async def test_signals_that_wait_for_a_worker_keep_their_places(on_nats: Mailboxes) -> None:
    """New signals would be placed behind those of threads that came later."""
    config = {"signal_ack_wait_s": 0.5, "signal_nack_max_delay_s": 0.5, "sweep_interval_s": 0.1}
    async with on_nats.open(1, **config) as (store,):
        threads = [fresh() for _ in range(3)]
        for thread_id in threads:
            await store.enqueue(thread_id)
        sweeper, until = Sweeper(store), time.monotonic() + 3
        swept = 0
        while time.monotonic() < until or swept < 2:
            swept += await sweeper.sweep()
        assert [s.thread_id for s in await store.pull_signals(timeout_s=5)] == threads
        assert store.statistics().counts["resignalled"] == 0


async def test_a_clock_of_postgres_that_goes_back_stops_no_sweeps(on_postgres: Mailboxes) -> None:
    async with on_postgres.open(1) as (store,):
        assert await store.backend.sweeps(1000)
        assert not await store.backend.sweeps(1000)
        # The last sweep seems to be two hours in the future.
        async with store.backend._pool.lend(5) as connection:  # type: ignore[attr-defined]
            table = f"{on_postgres.name}.mailbox_sweep"
            await connection.execute(f"UPDATE {table} SET swept_at = now() + interval '2 hours'")
        assert await store.backend.sweeps(1000)
        assert not await store.backend.sweeps(1000)


async def test_a_clock_of_nats_that_goes_back_stops_no_sweeps(
    on_nats: Mailboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server removes what has a time to live when its clock says so, which may be in hours."""
    async with on_nats.open(2) as stores:
        backend = _nats(stores[0])
        await backend._bucket.put([Outgoing(backend._keys.prefix + "sweep", b"-", ttl_s=7200)])
        monkeypatch.setattr(nats_sweeps, "_TURNS", 0.01)
        began = time.monotonic()
        while not await stores[0].backend.sweeps(30):  # so long that the turn is not over before the end of the test
            assert time.monotonic() - began < 20
            await asyncio.sleep(0.05)
        assert time.monotonic() - began >= 0.3
        assert not await stores[1].backend.sweeps(1000)


async def test_a_listener_that_could_not_be_told_of_is_none(on_nats: Mailboxes) -> None:
    async with on_nats.open(1) as (store,):
        backend, got = _nats(store), []

        async def handle(payload: bytes) -> None:
            got.append(payload)

        told = backend._live._told

        async def fails() -> None:
            raise BufstoreError("no answer")

        backend._live._told = fails  # type: ignore[method-assign]
        with pytest.raises(BufstoreError):
            await store.listen_live("t", handle)
        backend._live._told = told  # type: ignore[method-assign]
        assert backend._live._subscriptions.kept == []


async def test_a_listener_that_stops_while_all_listen_again_makes_no_other_deaf(on_nats: Mailboxes) -> None:
    """Subscribing waits while a client has much to send, and a listener may stop meanwhile."""
    async with on_nats.open(1) as (store,):
        live = _nats(store)._live

        async def handle(payload: bytes) -> None: ...

        stops = [await store.listen_live(thread_id, handle) for thread_id in ("one", "two", "three")]
        listening: list[str] = []

        class Subscription:
            def __init__(self, subject: str) -> None:
                self.subject = subject
                listening.append(subject)

            async def unsubscribe(self) -> None:
                listening.remove(self.subject)

        class NewClient:
            async def subscribe(self, subject: str, **_: Any) -> Subscription:
                if subject == live._prefix + token("one"):
                    await stops[0]()
                return Subscription(subject)

        await live._subscriptions.again(NewClient())  # type: ignore[arg-type]
        assert listening == [live._prefix + token(thread_id) for thread_id in ("two", "three")]


async def test_more_workers_than_the_consumer_lets_wait_ask_again_later(on_nats: Mailboxes) -> None:
    async with on_nats.open(1) as (store,):
        took: list[float] = []

        async def pull() -> None:
            began = time.monotonic()
            assert await store.pull_signals(timeout_s=1.0) == []
            took.append(time.monotonic() - began)

        await asyncio.gather(*(pull() for _ in range(530)))
        assert min(took) > 0.4


@pytest.mark.parametrize("listening", [False, True])
async def test_what_a_pull_took_that_nobody_waits_for_any_more_comes_at_once(
    on_postgres: Mailboxes, monkeypatch: pytest.MonkeyPatch, listening: bool
) -> None:
    """A worker is closed after the database has done its work and before the answer is read, or while it unsubscribes.

    Regression: with a notifier, the signal came after 30 s.
    """
    async with on_postgres.open(2) as (a, b):
        thread_id, took = fresh(), asyncio.Event()
        backend = a.backend
        assert isinstance(backend, PostgresBackend)
        run = backend._run

        async def slow(name: str, *arguments: Any) -> list[Any]:
            if name == "signal_nack":
                pulling.cancel()  # cancelled again while the signal is handed back
            rows = await run(name, *arguments)
            if name == "pull" and rows:
                if not listening:
                    took.set()
                await asyncio.sleep(0)  # the answer has arrived and is not read yet
            return rows

        async def unsubscribes() -> None:
            took.set()
            await asyncio.sleep(0.01)

        monkeypatch.setattr(backend, "_run", slow)
        if listening:
            monkeypatch.setattr(backend._idle, "end", unsubscribes)
        await a.enqueue(thread_id)
        pulling = asyncio.create_task(a.pull_signals(timeout_s=30))
        await took.wait()
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        await a.aclose()  # waits for the signal that is being handed back
        assert [s.thread_id for s in await b.pull_signals(timeout_s=5)] == [thread_id]


@pytest.mark.parametrize("bucket", ["a b", "a.b", "x\r\nPING", "*", ""])
async def test_a_name_that_no_bucket_can_have_is_not_sent(bucket: str) -> None:
    with pytest.raises(ConfigError, match="bucket"):
        await find_mailbox(NatsConfig(servers=("nats://127.0.0.1:1",)), bucket)


async def test_what_comes_after_the_server_went_back_is_seen(tmp_path: Path) -> None:
    """The server assigns sequences again that an instance has passed; the instance once did not look behind them."""
    server, copy = NatsServer(tmp_path / "data"), tmp_path / "copy"
    server.start()
    try:
        async with NatsMailboxStore(server.url) as mailbox:

            async def goes_round() -> None:
                await mailbox.enqueue("t", b"before")
                claim = await mailbox.claim("t", "w")
                assert claim is not None
                await mailbox.ack(claim)

            async def enqueued() -> bool:
                with suppress(LogUnavailable, StepUnknown):
                    await mailbox.enqueue("t", b"after")
                    return True
                return False

            async def answers() -> bool:
                with suppress(LogUnavailable):
                    await mailbox.list_dispatches("t")
                    return True
                return False

            await goes_round()
            await asyncio.to_thread(server.stop)
            shutil.copytree(tmp_path / "data", copy)
            await asyncio.to_thread(server.start)
            await eventually(answers, 30)
            for _ in range(20):
                await goes_round()
            await asyncio.to_thread(server.stop)
            shutil.rmtree(tmp_path / "data")
            shutil.move(copy, tmp_path / "data")
            await asyncio.to_thread(server.start)
            await eventually(enqueued, 30)
            claim = await mailbox.claim("t", "w")
            assert claim is not None
            assert claim.payload == b"after"
    finally:
        server.stop()


async def test_an_enqueue_does_not_believe_a_leader_that_was_left(on_nats: Mailboxes, monkeypatch: Any) -> None:
    """The deposed leader did not show an interrupt: the dispatch was superseded as soon as it was stored."""
    async with on_nats.open(1) as (mailbox,):
        backend, thread_id = _nats(mailbox), fresh()
        monkeypatch.setattr(backend._stream, "replicated", True)  # without replicas no leader is deposed
        subject = backend._keys.thread(thread_id)
        await mailbox.enqueue(thread_id, b"before")
        await mailbox.claim(thread_id, "w")
        old = (await backend._stream.last([subject], 5.0))[subject]
        await mailbox.interrupt(thread_id)
        last, lies = backend._stream.last, [old]

        async def left(subjects: Any, timeout_s: float) -> Any:
            found = await last(subjects, timeout_s)
            return found | {subject: lies.pop()} if lies and subject in found else found

        monkeypatch.setattr(backend._stream, "last", left)
        added = await mailbox.enqueue(thread_id, b"do this instead")
        found = await mailbox.load_dispatch(thread_id, added.dispatch_id)
        assert not lies
        assert found is not None
        assert found.status is Status.QUEUED
