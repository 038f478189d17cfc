"""Notifiers when servers restart, hang, lose data and refuse; and hints that many connections claim at once."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import nats
import psycopg
import pytest
from nats.aio.client import Client
from nats.js.api import KeyValueConfig
from psycopg.conninfo import make_conninfo
from psycopg_pool import AsyncConnectionPool
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from bufstore import ConfigError
from bufstore.embedded import NatsServer, PostgresServer, RedisServer, Servers
from bufstore.errors import NotifyUnavailable, StoreMisconfigured, Unavailable
from bufstore.notify import Hints, NatsNotifier, Notifier, PostgresNotifier, RedisNotifier, wait_for_work
from bufstore.notify.nats_hints import HintStore
from bufstore.notify.postgres import PostgresBroker
from bufstore.notify.protocol import Event
from bufstore.notify.redis import RedisBroker
from bufstore.postgres.connection.alarm import in_time
from fault_proxy.proxy import FaultProxy
from helpers import eventually, query
from thorough import seldom
from transaction_pooler import TransactionPooler

Server = NatsServer | RedisServer | PostgresServer


@pytest.fixture
def prefix() -> str:
    return f"t{secrets.token_hex(4)}"


@pytest.fixture(scope="module", params=["nats", "redis", "postgres"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that these tests may stop."""
    if request.param == "redis":
        request.getfixturevalue("redis_server")  # skips the test where there is no Redis
    with contextlib.ExitStack() as stack:
        if request.param == "postgres":
            yield stack.enter_context(Servers()).postgres
            return
        kind = NatsServer if request.param == "nats" else RedisServer
        made = kind(tmp_path_factory.mktemp(request.param))
        made.start()
        stack.callback(made.stop)
        yield made


async def _open(server: Server, prefix: str, **options: Any) -> Notifier:
    if isinstance(server, NatsServer):
        options.pop("quiet_s", None)
        return await NatsNotifier.open(server.url, prefix=prefix, **options)
    if isinstance(server, RedisServer):
        return await RedisNotifier.open(server.url, prefix=prefix, **options)
    return await PostgresNotifier.open(server.dsn, prefix=prefix, **options)


class Listening:
    """A notifier with one listener of each event, and what they heard."""

    def __init__(self, notifier: Notifier) -> None:
        self.notifier = notifier
        self.heard: list[str] = []

    async def listen(self) -> None:
        await self.notifier.listen_scheduled(["kind"], self.heard.append)
        await self.notifier.listen_completed("work", lambda: self.heard.append("completed"))
        await self.notifier.listen_ownership_lost("work", lambda: self.heard.append("lost"))

    async def hears(self, teller: Notifier) -> None:
        """Notify until a listener hears it."""
        self.heard.clear()

        async def told() -> bool:
            await teller.notify_completed("work")
            return bool(self.heard)

        await eventually(told)


async def test_it_heals_after_a_restart_and_calls_everybody_once(server: Server, prefix: str) -> None:
    async with await _open(server, prefix) as here, await _open(server, prefix) as there:
        listening = Listening(here)
        await listening.listen()
        await asyncio.to_thread(server.kill)
        await there.notify_completed("work")
        assert there.statistics().dropped == 1
        await asyncio.to_thread(server.start)
        await eventually(lambda: _true(here.statistics().restored))
        assert sorted(listening.heard) == ["completed", "kind", "lost"]
        assert here.statistics().restored == 1
        await listening.hears(there)
        listening.heard.clear()
        await there.notify_scheduled("kind")
        await eventually(lambda: _true(listening.heard))


async def _true(value: object) -> bool:
    return bool(value)


async def test_listening_without_a_server_says_so_and_works_later(server: Server, prefix: str) -> None:
    async with await _open(server, prefix, timeout_s=1) as here, await _open(server, prefix) as there:
        await asyncio.to_thread(server.kill)
        try:
            with pytest.raises(Unavailable):
                await here.listen_completed("work", print)
            assert here._completed.everyone() == []
        finally:
            await asyncio.to_thread(server.start)
        listening = Listening(here)

        async def listens() -> bool:
            with contextlib.suppress(Unavailable):
                await listening.listen()
                return True
            return False

        await eventually(listens)
        await listening.hears(there)


async def test_a_server_that_hangs_holds_nobody_up(server: Server, prefix: str) -> None:
    async with await _open(server, prefix, timeout_s=0.5) as here:
        await here.notify_completed("work")
        before = here.statistics().dropped  # 0, unless the machine paused for half a second
        await asyncio.to_thread(server.pause)
        try:
            async with asyncio.timeout(15):
                await here.notify_scheduled("kind", 3)
                await here.notify_completed("work")
                with pytest.raises((Unavailable, TimeoutError)):
                    await here.listen_completed("work", print)
        finally:
            server.resume()
        assert here.statistics().dropped - before == 2

        async def published() -> bool:
            await here.notify_completed("work")
            return here.statistics().healthy

        await eventually(published)


# NATS.


@pytest.mark.parametrize("hints", [Hints.COUNTERS, Hints.KV])
@pytest.mark.parametrize("budget", [1, 10, 100, *seldom(99)])
async def test_a_hundred_connections_take_exactly_what_there_is(
    servers: Servers, prefix: str, hints: Hints, budget: int
) -> None:
    store = HintStore(prefix, hints, "$JS.API", 30)
    async with contextlib.AsyncExitStack() as stack:
        clients = await asyncio.gather(*(nats.connect(servers.nats.url) for _ in range(100)))
        for client in clients:
            stack.push_async_callback(client.close)
        hint = secrets.token_hex(16)
        await store.provide(clients[0], hint, budget)
        stores = [HintStore(prefix, hints, "$JS.API", 30) for _ in clients]
        async with asyncio.timeout(60):
            got = await asyncio.gather(*(s.claim(c, hint, 1) for s, c in zip(stores, clients, strict=True)))
        assert sum(got) == budget
        assert await store.claim(clients[0], hint, 5) == 0
        assert await store.claim(clients[0], secrets.token_hex(16), 5) == 5  # an unknown hint wakes everybody


@pytest.mark.parametrize("hints", [Hints.COUNTERS, Hints.KV])
async def test_hints_on_nats_end_after_a_minute(servers: Servers, prefix: str, hints: Hints) -> None:
    client = await nats.connect(servers.nats.url)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        notifier = await NatsNotifier.open(client, prefix=prefix, hints=hints, timeout_s=10)
        stack.push_async_callback(notifier.aclose)
        heard: list[str] = []
        for _ in range(3):
            await notifier.listen_scheduled(["kind"], heard.append)
        await notifier.notify_scheduled("kind", 1)
        await eventually(lambda: _true(notifier.statistics().spared == 2))
        stream = f"{prefix}-hints" if hints is Hints.COUNTERS else f"KV_{prefix}_hints"
        config = (await client.jetstream().stream_info(stream)).config
        assert config.max_age == 60
        assert config.max_msgs_per_subject == 1


async def test_a_hint_that_has_expired_wakes_everybody(servers: Servers, prefix: str) -> None:
    client = await nats.connect(servers.nats.url)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        for hints, stream in ((Hints.COUNTERS, f"{prefix}-hints"), (Hints.KV, f"KV_{prefix}_hints")):
            store = HintStore(prefix, hints, "$JS.API", 5)
            await store.provide(client, "hint", 1)
            assert [await store.claim(client, "hint", 1) for _ in range(2)] == [1, 0]
            await client.jetstream().purge_stream(stream)  # as the server does when the hint's time is over
            assert await store.claim(client, "hint", 4) == 4


async def test_a_client_and_a_bucket_of_the_apps_own(tmp_path: Path, prefix: str) -> None:
    server = NatsServer(tmp_path)
    server.start()
    try:
        client = await nats.connect(server.url, reconnect_time_wait=0.05, max_reconnect_attempts=-1)
        bucket = await client.jetstream().create_key_value(KeyValueConfig(bucket="mine", ttl=60, history=1))
        notifier = await NatsNotifier.open(client, prefix=prefix, hints=bucket, timeout_s=10)
        listening = Listening(notifier)
        await listening.listen()
        await notifier.listen_scheduled(["kind"], listening.heard.append)
        await notifier.notify_scheduled("kind", 1)
        await eventually(lambda: _true(notifier.statistics().spared))
        assert listening.heard == ["kind"]
        keys = await bucket.keys()
        assert [key.startswith(f"{prefix}_hint_") for key in keys] == [True]
        listening.heard.clear()
        await asyncio.to_thread(server.restart)
        await eventually(lambda: _true(notifier.statistics().restored))
        assert sorted(listening.heard) == ["completed", "kind", "kind", "lost"]
        await listening.hears(notifier)
        await notifier.aclose()
        assert client.is_connected  # the app closes its own client
        await client.close()
        with pytest.raises(NotifyUnavailable):
            other = await NatsNotifier.open(client, prefix=prefix)
            await other.listen_completed("work", print)
    finally:
        server.stop()


@pytest.mark.parametrize("hints", [Hints.COUNTERS, Hints.KV])
async def test_a_hint_store_that_is_gone_wakes_everybody_and_is_made_again(
    servers: Servers, prefix: str, hints: Hints
) -> None:
    async with (
        await NatsNotifier.open(servers.nats.url, prefix=prefix, hints=hints, timeout_s=10) as here,
        await NatsNotifier.open(servers.nats.url, prefix=prefix, hints=hints, timeout_s=10) as there,
    ):
        heard: list[str] = []
        for _ in range(4):
            await here.listen_scheduled(["kind"], heard.append)
        await there.notify_scheduled("kind", 1)
        await eventually(lambda: _true(here.statistics().spared == 3))
        client = await nats.connect(servers.nats.url)
        stream = f"{prefix}-hints" if hints is Hints.COUNTERS else f"KV_{prefix}_hints"
        await client.jetstream().delete_stream(stream)
        await client.close()
        heard.clear()
        await there.notify_scheduled("kind", 1)
        await eventually(lambda: _true(len(heard) >= 4))
        assert there.statistics().hint_failures == 1
        heard.clear()
        await there.notify_scheduled("kind", 1)
        await eventually(lambda: _true(here.statistics().spared == 6))
        assert len(heard) == 1


async def test_a_server_without_counters_keeps_hints_in_kv(
    servers: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many instances find out at the same time that the server is too old for counters."""
    older = SimpleNamespace(major=2, minor=11, patch=11)
    monkeypatch.setattr(Client, "connected_server_version", property(lambda _: older))
    async with contextlib.AsyncExitStack() as stack:
        notifiers = [await NatsNotifier.open(servers.nats.url, prefix=prefix, timeout_s=10) for _ in range(10)]
        heard: list[str] = []
        for notifier in notifiers:
            stack.push_async_callback(notifier.aclose)
            await notifier.listen_scheduled(["kind"], heard.append)
        await notifiers[0].notify_scheduled("kind", 3)
        # Each notifier is answered on a connection of its own, so that those who are woken may come last.
        await eventually(lambda: _true(sum(n.statistics().woken + n.statistics().spared for n in notifiers) == 10))
        assert len(heard) == 3
        assert {notifier.hints for notifier in notifiers} == {Hints.KV}


async def test_without_jetstream_there_are_no_hints(tmp_path: Path, prefix: str) -> None:
    denied = "accounts { A: { users: [ { user: a, password: b } ] } }"
    server = NatsServer(tmp_path, extra_config=denied)
    server.start()
    try:
        url = f"nats://a:b@127.0.0.1:{server.port}"
        async with await NatsNotifier.open(url, prefix=prefix, timeout_s=10) as notifier:
            heard: list[str] = []
            for _ in range(3):
                await notifier.listen_scheduled(["kind"], heard.append)
            for n in (1, 2):
                await notifier.notify_scheduled("kind", 1)
                await eventually(lambda n=n: _true(len(heard) == 3 * n))  # type: ignore[misc]
            assert notifier.hints is Hints.AUTO
            assert notifier.statistics().dropped == 0
    finally:
        server.stop()


# Redis.


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_server.url) as client:
        yield client


async def test_claims_keep_a_hints_lifetime_and_make_no_keys(redis: Redis, prefix: str) -> None:
    broker = RedisBroker(redis, redis, prefix, hints=True, owned=False, timeout_s=20, quiet_s=20)
    await broker.publish_hinted("h", 3, "h:kind")
    key = f"{prefix}:hint:h"
    assert 55_000 < await redis.pttl(key) <= 60_000
    assert [await broker.claim("h", 2) for _ in range(4)] == [2, 1, 0, 0]
    assert await redis.get(key) == b"0"
    assert 55_000 < await redis.pttl(key) <= 60_000
    assert await broker.claim("unknown", 7) == 7
    assert [k async for k in redis.scan_iter(f"{prefix}:*")] == [key.encode()]
    await redis.pexpire(key, 1)
    assert await eventually(lambda: _expired(redis, key))
    assert await broker.claim("h", 4) == 4
    await broker.aclose()


async def _expired(redis: Redis, key: str) -> bool:
    return not await redis.exists(key)


@pytest.mark.parametrize("budget", [1, 10, 99, 100])
async def test_a_hundred_redis_clients_take_exactly_what_there_is(
    redis_server: RedisServer, prefix: str, budget: int
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Redis.from_url(redis_server.url)) for _ in range(100)]
        brokers = [RedisBroker(c, c, prefix, hints=True, owned=False, timeout_s=20, quiet_s=20) for c in clients]
        await brokers[0].publish_hinted("h", budget, "h:kind")
        assert sum(await asyncio.gather(*(broker.claim("h", 1) for broker in brokers))) == budget


async def test_a_client_of_the_apps_that_reconnects_by_itself(redis_server: RedisServer, prefix: str) -> None:
    """The app's client reconnects and subscribes again by itself, without telling the notifier."""
    async with (
        Redis.from_url(redis_server.url, decode_responses=True) as mine,
        await RedisNotifier.open(mine, prefix=prefix, timeout_s=10) as notifier,
    ):
        listening = Listening(notifier)
        await listening.listen()
        await mine.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await eventually(lambda: _true(notifier.statistics().restored))
        assert sorted(listening.heard) == ["completed", "kind", "lost"]
        await listening.hears(notifier)
        assert notifier.statistics().restored == 1


async def test_a_redis_that_went_silent_is_noticed(
    tmp_path: Path, redis_server: RedisServer, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        async with await RedisNotifier.open(server.url, prefix=prefix, timeout_s=10, quiet_s=0.2) as notifier:
            listening = Listening(notifier)
            await listening.listen()
            await asyncio.to_thread(server.pause)
            await eventually(lambda: _true("lost the connection" in caplog.text))
            server.resume()
            await eventually(lambda: _true(notifier.statistics().restored))
            await listening.hears(notifier)
    finally:
        server.stop()


@pytest.mark.long  # two quiet periods
async def test_a_redis_that_answers_is_not_taken_for_silent(redis_server: RedisServer, prefix: str) -> None:
    # A quiet period is longer than the machine may pause.
    async with await RedisNotifier.open(redis_server.url, prefix=prefix, timeout_s=10, quiet_s=3.5) as notifier:
        listening = Listening(notifier)
        await listening.listen()
        await asyncio.sleep(7.5)  # two quiet periods, in which the notifier asks and is answered
        assert (notifier.statistics().restored, listening.heard) == (0, [])


async def test_a_redis_client_that_decodes_answers_is_taken_for_no_lost_connection(
    redis_server: RedisServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: such a client shows the answer to a ping as {'type': 'P', …}, which was taken for a confirmation."""
    answers: list[Any] = []
    get_message = PubSub.get_message

    async def noted(self: PubSub, *args: Any, **options: Any) -> Any:
        answers.append(await get_message(self, *args, **options))
        return answers[-1]

    monkeypatch.setattr(PubSub, "get_message", noted)
    async with (
        Redis.from_url(redis_server.url, decode_responses=True) as mine,
        await RedisNotifier.open(mine, prefix=prefix, timeout_s=10, quiet_s=0.05) as notifier,
    ):
        await Listening(notifier).listen()
        await eventually(lambda: _true(len([a for a in answers if a is not None]) > 5))
        assert notifier.statistics().restored == 0


async def test_redis_that_refuses_says_so(redis_server: RedisServer, prefix: str) -> None:
    wrong = f"redis://:wrong@127.0.0.1:{redis_server.port}"
    async with await RedisNotifier.open(wrong, prefix=prefix) as notifier:
        with pytest.raises(ConfigError) as caught:
            await notifier.listen_completed("work", print)
        assert "wrong" not in str(caught.value)
        await notifier.notify_scheduled("kind")
        assert notifier.statistics().dropped == 1
    with pytest.raises(ConfigError) as caught:
        await RedisNotifier.open("nothing://:secret@host", prefix=prefix)
    assert "secret" not in repr(caught.value.__context__)


# Postgres.


async def test_a_killed_listening_session_is_made_again(servers: Servers, prefix: str) -> None:
    async with await PostgresNotifier.open(servers.postgres.dsn, prefix=prefix, timeout_s=10) as notifier:
        listening = Listening(notifier)
        await listening.listen()
        await eventually(lambda: _is(lambda: _listening_sessions(servers), 1))  # sessions of earlier tests have ended
        killed = await query(servers.postgres.dsn, f"SELECT pg_terminate_backend(pid) {_LISTENING}")
        assert killed == [(True,)]
        await eventually(lambda: _true(notifier.statistics().restored))
        assert sorted(listening.heard) == ["completed", "kind", "lost"]
        await listening.hears(notifier)


_LISTENING = "FROM pg_stat_activity WHERE query = 'SELECT pg_listening_channels()' AND state = 'idle'"


async def _listening_sessions(servers: Servers) -> int:
    return int((await query(servers.postgres.dsn, f"SELECT count(*) {_LISTENING}"))[0][0])


async def test_one_session_listens_and_only_while_somebody_does(servers: Servers, prefix: str) -> None:
    async def sessions() -> int:
        return await _listening_sessions(servers)

    async with await PostgresNotifier.open(servers.postgres.dsn, prefix=prefix, timeout_s=10) as notifier:
        await eventually(lambda: _is(sessions, 0))  # the sessions of earlier tests have ended
        leaves = [await notifier.listen_completed(f"work {i}", print) for i in range(10)]
        leaves += [await notifier.listen_scheduled(["kind"], print)]
        assert await sessions() == 1
        for leave in leaves:
            await leave()
        await eventually(lambda: _is(sessions, 0))


async def _is(count: Callable[[], Awaitable[int]], expected: int) -> bool:
    return await count() == expected


@pytest.mark.long  # two quiet periods
async def test_a_quiet_session_is_asked_whether_it_listens(servers: Servers, prefix: str) -> None:
    # The session has a quiet period for its answer, which is longer than the machine may pause.
    async with await PostgresNotifier.open(servers.postgres.dsn, prefix=prefix, timeout_s=10, quiet_s=3.5) as notifier:
        listening = Listening(notifier)
        await listening.listen()
        for n in range(2):
            await asyncio.sleep(4)  # a check of the session
            await notifier.notify_completed("work")
            await eventually(lambda n=n: _true(len(listening.heard) == n + 1))  # type: ignore[misc]
        assert notifier.statistics().restored == 0


async def test_a_pool_of_the_apps_own(servers: Servers, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncConnectionPool(servers.postgres.dsn, min_size=1, max_size=3, open=False) as pool:
        async with await PostgresNotifier.open(pool, prefix=prefix, timeout_s=10) as notifier:
            listening = Listening(notifier)
            await listening.listen()
            await listening.hears(notifier)
        for _ in range(3):  # the listening connection came back to the pool as it was
            async with pool.connection() as connection:
                rows = await (await connection.execute("SELECT count(*) FROM pg_listening_channels()")).fetchone()
                assert (rows, connection.autocommit) == ((0,), False)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_a_listening_connection_whose_return_is_cancelled_goes_back_closed(
    servers: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the app got it with autocommit, and its rollback took nothing back."""
    returning = asyncio.Event()
    async with (
        AsyncConnectionPool(servers.postgres.dsn, min_size=1, max_size=1, open=False) as pool,
        await PostgresNotifier.open(pool, prefix=prefix, timeout_s=10) as notifier,
    ):
        source = await cast(PostgresBroker, notifier._broker)._attach()
        connection = source._connection

        async def slow(_: str) -> None:
            returning.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(connection, "execute", slow)
        closing = asyncio.create_task(source.aclose())
        await returning.wait()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert connection.closed
        async with pool.connection() as other:
            rows = await (await other.execute("SELECT count(*) FROM pg_listening_channels()")).fetchone()
            assert (rows, other.autocommit) == ((0,), False)


def _wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a quiet time be no limit for answers: a busy machine may take longer than a short one."""

    def patient(connection: psycopg.AsyncConnection[Any], _: float) -> contextlib.AbstractAsyncContextManager[None]:
        return in_time(connection, 20)

    monkeypatch.setattr("bufstore.notify.postgres.in_time", patient)


@pytest.mark.parametrize("discards", [True, False])
async def test_a_transaction_pooler_cannot_listen_and_is_found_out(
    servers: Servers, prefix: str, discards: bool
) -> None:
    """PgBouncer discards nothing: the session where LISTEN was executed was asked next, and said that it listens."""
    async with TransactionPooler(servers.postgres.dsn, discards=discards) as pooler:
        async with await PostgresNotifier.open(pooler.dsn, prefix=prefix, timeout_s=10) as notifier:
            began = time.monotonic()
            with pytest.raises(NotifyUnavailable, match="listen"):
                await notifier.listen_completed("work", print)
            if discards:
                assert time.monotonic() - began < 10, "no proof was waited for"
        direct = servers.postgres.dsn
        async with await PostgresNotifier.open(pooler.dsn, listen=direct, prefix=prefix, timeout_s=10) as notifier:
            listening = Listening(notifier)
            await listening.listen()
            await listening.hears(notifier)


async def test_a_session_behind_a_pooler_is_proven_to_listen_and_misses_nothing(
    servers: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pooled(_: object) -> bool:
        return True

    monkeypatch.setattr("bufstore.notify.postgres._Source._is_pooled", pooled)
    _wait_for_answers(monkeypatch)
    heard: list[int] = []
    async with (
        await PostgresNotifier.open(servers.postgres.dsn, prefix=prefix, quiet_s=0.05) as notifier,
        await PostgresNotifier.open(servers.postgres.dsn, prefix=prefix) as other,
    ):
        await notifier.listen_completed("work", lambda: heard.append(1))
        for n in range(30):  # some beside a proof
            await other.notify_completed("work")
            await asyncio.sleep(0.01 * (n % 10))

        async def all_heard() -> bool:
            return len(heard) == 30

        await eventually(all_heard)
        assert notifier.statistics().restored == 0


async def test_a_listening_connection_that_hangs_is_noticed_after_the_quiet_time(servers: Servers, prefix: str) -> None:
    """Regression: it was also waited for as long as a proof takes, which a way to Postgres itself needs none of."""
    server = servers.postgres
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        listen = server.dsn.replace(f":{server.port}", f":{proxy.port}")
        async with await PostgresNotifier.open(
            server.dsn, listen=listen, prefix=prefix, timeout_s=20, quiet_s=0.5
        ) as notifier:
            source = await cast(PostgresBroker, notifier._broker)._attach()
            try:
                proxy.to_server.swallow = proxy.to_client.swallow = True
                async with asyncio.timeout(20):
                    with pytest.raises(psycopg.OperationalError):
                        await source.next()
            finally:
                proxy.heal()
                await source.aclose()


async def test_a_proof_that_cannot_be_sent_tells_nothing_of_who_listens(
    servers: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: with a busy pool of the app's, a connection that listened was thrown away, again and again."""
    unsent = 0
    notify = PostgresBroker._notify

    async def pooled(_: object) -> bool:
        return True

    async def counted(broker: PostgresBroker, channel: str, payload: str) -> None:
        nonlocal unsent
        try:
            await notify(broker, channel, payload)
        except Unavailable:
            unsent += 1
            raise

    monkeypatch.setattr("bufstore.notify.postgres._Source._is_pooled", pooled)
    _wait_for_answers(monkeypatch)
    monkeypatch.setattr(PostgresBroker, "_notify", counted)
    dsn = servers.postgres.dsn
    async with (
        AsyncConnectionPool(dsn, min_size=2, max_size=2, open=False) as pool,
        await PostgresNotifier.open(pool, prefix=prefix, timeout_s=2, quiet_s=0.2) as notifier,
        await PostgresNotifier.open(dsn, prefix=prefix) as other,
    ):
        listening = Listening(notifier)
        await listening.listen()
        async with pool.connection(timeout=20):  # the only other one: the app is busy
            for n in range(2):
                await eventually(lambda n=n: _true(unsent > n))  # type: ignore[misc]
                await other.notify_completed("work")
            await eventually(lambda: _true(listening.heard == ["completed"] * 2))
        assert notifier.statistics().restored == 0


async def test_why_postgres_cannot_be_listened_to_is_said_and_workers_poll(
    servers: Servers, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    right = servers.postgres.dsn
    wrong = make_conninfo(right, password="no")

    async def is_due() -> float | None:
        return 0

    refused: list[dict[str, Any]] = [{"postgres": right, "listen": wrong}, {"postgres": wrong}]
    for options in refused:
        caplog.clear()
        async with await PostgresNotifier.open(**options, prefix=prefix) as notifier:
            with pytest.raises(StoreMisconfigured, match="password authentication failed"):
                await notifier.listen_completed("work", print)
            assert await wait_for_work(notifier, ["kind"], is_due)
            assert not notifier.statistics().healthy
        assert "password authentication failed" in caplog.text
    down = make_conninfo(right, port="1")
    async with await PostgresNotifier.open(right, listen=down, prefix=prefix) as notifier:
        with pytest.raises(NotifyUnavailable, match="Connection refused"):
            await notifier.listen_completed("work", print)


async def test_a_prefix_too_long_for_a_channel_is_refused(servers: Servers) -> None:
    with pytest.raises(ConfigError):
        await PostgresNotifier.open(servers.postgres.dsn, prefix=f"{'x' * 40}.{'y' * 20}")


async def test_a_notification_that_an_apps_pool_cannot_commit_ends_in_its_time(
    own_servers: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the pool committed once the time was no longer looked at, and a proof waited for that for ever."""
    server, execute = own_servers.postgres, psycopg.AsyncConnection.execute
    async with FaultProxy("127.0.0.1", server.port) as proxy:

        async def then_silent(connection: psycopg.AsyncConnection[Any], *given: Any) -> Any:
            found = await execute(connection, *given)
            proxy.to_server.swallow = proxy.to_client.swallow = True
            return found

        dsn = make_conninfo(server.dsn, port=proxy.port)
        async with AsyncConnectionPool(dsn, min_size=1, max_size=1, open=False) as pool:
            await pool.wait()
            broker = PostgresBroker(pool, prefix, owned=False, listen=None, timeout_s=0.5, quiet_s=1.0)
            monkeypatch.setattr(psycopg.AsyncConnection, "execute", then_silent)
            async with asyncio.timeout(10):
                with pytest.raises(Unavailable):
                    await broker.publish(Event.COMPLETED, "x")
            proxy.to_server.swallow = proxy.to_client.swallow = False
