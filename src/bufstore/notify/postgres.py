"""The notifier on Postgres: NOTIFY from the pool, LISTEN on one connection that is kept.

No hints: in Postgres a worker that is woken for nothing skips the locked rows in one query. A listening connection is
asked now and then whether it still listens: behind a pooler in transaction mode, or after a failover, it may not.

What a pooler answers is no proof. In transaction mode PgBouncer leaves a LISTEN in the session where it was executed;
the next question most often gets the same session, which says that it listens, but what it hears reaches nobody. So
behind a pooler a notification of our own must come through.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any, LiteralString, Self

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool

from bufstore.config import check_timeout
from bufstore.errors import BufstoreError, ConfigError, NotifyUnavailable, Unavailable
from bufstore.notify.broker import HintUnavailable
from bufstore.notify.notifier import Notifier
from bufstore.notify.payload import channel, check_prefix
from bufstore.notify.protocol import Event
from bufstore.notify.subscription import HealingBroker, Heard
from bufstore.postgres.connection.alarm import in_time
from bufstore.postgres.connection.conninfo import own_conninfo
from bufstore.postgres.connection.errors import NoAnswer, map_errors
from bufstore.postgres.connection.pool import Pool, connect, open_pool

#: A listening connection that is silent for this long is asked whether it listens.
_QUIET_S = 10.0
#: A publish ends itself in time and in good order. It is cancelled only when that takes this much longer.
_GRACE_S = 2.0
#: The longest name of a channel, in bytes.
_CHANNEL_BYTES = 63

AnyPool = AsyncConnectionPool[Any]


class PostgresBroker(HealingBroker):
    """See `bufstore.notify.broker.Broker`."""

    def __init__(
        self, pool: AnyPool, prefix: str, *, owned: bool, listen: str | None, timeout_s: float, quiet_s: float
    ) -> None:
        super().__init__("notifier on Postgres")
        self._pool = pool
        self._owned = owned
        self._listen = listen
        self._timeout_s = timeout_s
        self._quiet_s = quiet_s
        self._channels = {event: channel(prefix, event, "_") for event in Event}

    async def publish(self, event: Event, payload: str) -> None:
        await self._notify(self._channels[event], payload)

    async def _notify(self, channel: str, payload: str) -> None:
        async with self._borrow() as connection:
            await connection.execute("SELECT pg_notify(%s, %s)", (channel, payload))
            await connection.commit()  # here, where its time is bounded, and not by an app's own pool

    async def publish_hinted(self, hint: str, count: int, payload: str) -> None:
        raise HintUnavailable

    def claim(self, hint: str, wanted: int) -> int:
        return wanted

    def closes_here(self) -> bool:
        return not isinstance(self._pool, Pool) or self._pool.closes_here()

    async def aclose(self) -> None:
        await super().aclose()
        if self._owned:
            await self._pool.close()

    @asynccontextmanager
    async def _borrow(self) -> AsyncIterator[AsyncConnection[Any]]:
        if isinstance(self._pool, Pool):
            async with self._pool.lend(self._timeout_s) as connection:
                yield connection
            return
        with map_errors():
            async with (
                self._pool.connection(timeout=self._timeout_s) as connection,
                in_time(connection, self._timeout_s),
            ):
                yield connection

    async def _attach(self) -> _Source:
        try:
            with map_errors():
                return await self._listening()
        except NotifyUnavailable:
            raise
        except Unavailable as e:
            reason = str(e)
        # Not raised within the except: psycopg's error would be our context, and has the password in an attribute.
        raise NotifyUnavailable(f"cannot listen on Postgres: {reason}")

    async def _listening(self) -> _Source:
        if self._listen is not None:
            connection = await connect(
                self._listen,
                autocommit=True,
                prepare_threshold=None,
                application_name="bufstore-notify",
                connect_timeout=max(2, round(self._timeout_s)),
            )
            return await self._listen_on(connection, None)
        if isinstance(self._pool, Pool):
            return await self._listen_on(await self._pool.take(self._timeout_s), self._pool)
        for _ in range(self._pool.max_size):
            # A connection of the pool may be dead: drop it and try the next, and in the end a new one.
            with suppress(NoAnswer), map_errors():
                return await self._listen_on(await self._pool.getconn(self._timeout_s), self._pool)
        return await self._listen_on(await self._pool.getconn(self._timeout_s), self._pool)

    async def _listen_on(self, connection: AsyncConnection[Any], pool: AnyPool | None) -> _Source:
        source = _Source(connection, pool, self._channels, self._quiet_s, self._notify, self._timeout_s)
        try:
            await source.listen()
        except BaseException:
            await source.aclose()
            raise
        return source


class _Source:
    """One connection that listens on the three channels."""

    def __init__(
        self,
        connection: AsyncConnection[Any],
        pool: AnyPool | None,
        channels: dict[Event, str],
        quiet_s: float,
        notify: Callable[[str, str], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        """`notify`: sends a notification on another connection."""
        self._connection = connection
        self._pool = pool
        self._events = {name: event for event, name in channels.items()}
        self._quiet_s = quiet_s
        self._notify = notify
        self._timeout_s = timeout_s
        self._autocommit = connection.autocommit
        self._notes: Any = None
        #: What was heard beside a proof.
        self._heard: deque[Heard] = deque()
        #: The channel of proofs; None: the connection leads to Postgres itself, which needs none.
        self._proof: str | None = None

    async def listen(self) -> None:
        async with in_time(self._connection, self._timeout_s):
            if not self._connection.autocommit:
                await self._connection.set_autocommit(True)
            if await self._is_pooled():
                self._proof = f"bufstore_proof_{secrets.token_hex(8)}"
                await self._listen(self._proof)
                await self._check_registered([self._proof])  # a pooler that discards it is found out at once
        if self._proof is not None:
            # The proof comes first: of a connection that hears nothing, no LISTEN stays behind that is ever notified.
            await self._prove(await self._send_proof(self._proof))
        async with in_time(self._connection, self._timeout_s):
            for name in self._events:
                await self._listen(name)
            await self._check_registered(self._events)

    async def _listen(self, name: str) -> None:
        await self._connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(name)))

    async def next(self) -> Heard | None:
        while True:
            if self._heard:
                return self._heard.popleft()
            if self._notes is None:
                self._notes = self._connection.notifies(timeout=self._quiet_s)
            try:
                note = await anext(self._notes)
            except StopAsyncIteration:
                self._notes = None
                await self._check()
                continue
            if (heard := self._known(note)) is not None:
                return heard

    def _known(self, note: psycopg.Notify) -> Heard | None:
        event = self._events.get(note.channel)  # a connection of the app's pool may listen on channels of the app's
        return (event, note.payload) if event is not None else None

    async def aclose(self) -> None:
        with suppress(psycopg.Error, OSError, RuntimeError):
            if self._notes is not None:
                await self._notes.aclose()
        clean = False
        try:
            # The pool lends the connection to others: it goes back as it was before, or closed.
            async with in_time(self._connection, _GRACE_S):
                await self._connection.execute("UNLISTEN *")
                await self._connection.set_autocommit(self._autocommit)
            clean = True
        except (psycopg.Error, OSError):
            pass
        finally:  # also when cancelled: an app's transaction must not be one without a rollback
            if self._pool is None or not clean:
                await self._connection.close()
            if self._pool is not None:
                await self._pool.putconn(self._connection)

    async def _is_pooled(self) -> bool:
        """Return whether a pooler is between: it has a process id of its own for each client."""
        return await self._ask("SELECT pg_backend_pid()") != {self._connection.info.backend_pid}

    async def _check(self) -> None:
        async with in_time(self._connection, self._quiet_s):
            await self._check_registered(self._events)
        if self._proof is None:
            return
        try:
            payload = await self._send_proof(self._proof)
        except (BufstoreError, psycopg.Error, OSError):
            return  # the app's pool has no connection free, say: that tells nothing of this one
        await self._prove(payload)

    async def _check_registered(self, names: Collection[str]) -> None:
        if not await self._ask("SELECT pg_listening_channels()") >= set(names):
            raise _deaf()

    async def _send_proof(self, channel: str) -> str:
        """Send a notification on another connection, and return its payload, which no other one has."""
        payload = secrets.token_hex(8)
        await self._notify(channel, payload)
        return payload

    async def _prove(self, payload: str) -> None:
        """Hear the notification that was sent. Raises NotifyUnavailable if it does not come."""
        loop = asyncio.get_running_loop()
        until, proven = loop.time() + self._timeout_s, False
        while not proven and (left_s := until - loop.time()) > 0:
            # To its end, which comes behind all that arrived together.
            async for note in self._connection.notifies(timeout=left_s, stop_after=1):
                proven = proven or (note.channel, note.payload) == (self._proof, payload)
                if (heard := self._known(note)) is not None:
                    self._heard.append(heard)
        if not proven:
            raise _deaf()

    async def _ask(self, question: LiteralString) -> set[Any]:
        cursor = self._connection.cursor(row_factory=tuple_row)  # an app's pool may have another
        await cursor.execute(question)
        return {row[0] for row in await cursor.fetchall()}


def _deaf() -> NotifyUnavailable:
    return NotifyUnavailable(
        "the connection lost its LISTEN registration; behind a pooler in transaction mode, pass `listen`"
    )


class PostgresNotifier(Notifier):
    """A notifier on Postgres; made by `open`."""

    @classmethod
    async def open(
        cls,
        postgres: str | AnyPool,
        *,
        listen: str | None = None,
        prefix: str = "bufstore",
        timeout_s: float = 2.0,
        quiet_s: float = _QUIET_S,
    ) -> Self:
        """Use a pool of the app's, which the app still closes, or make a small one of a connection string.

        While anybody listens, one connection of the pool is kept for that. `listen` is a connection string to use
        instead, for a pool that goes through a pooler in transaction mode. After `quiet_s` without a notification the
        listening connection is asked whether it still listens. Postgres need not be up. Raises ConfigError.
        """
        if len(channel(check_prefix(prefix), Event.COMPLETED, "_")) > _CHANNEL_BYTES:
            raise ConfigError("a notifier's prefix on Postgres must be at most 56 characters")
        check_timeout(timeout_s, "timeout_s")
        check_timeout(quiet_s, "quiet_s")
        if listen is not None:
            listen = own_conninfo(listen)
        own = isinstance(postgres, str)
        if not isinstance(postgres, str | AsyncConnectionPool):
            raise ConfigError(f"postgres must be a connection string or a pool, not {type(postgres).__name__}")
        pool: AnyPool = (
            await open_pool(postgres, size=4, connect_timeout_s=timeout_s) if isinstance(postgres, str) else postgres
        )
        broker = PostgresBroker(pool, prefix, owned=own, listen=listen, timeout_s=timeout_s, quiet_s=quiet_s)
        return cls(broker, timeout_s=timeout_s + _GRACE_S)
