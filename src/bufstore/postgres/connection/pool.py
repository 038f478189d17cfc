"""The pool of connections: opens without Postgres, lends only live connections, ends every call in time.

It works behind a pooler in transaction mode: autocommit, no prepared statements, no session state.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NoReturn, Self

import psycopg
from psycopg import AsyncConnection, AsyncPipeline, IsolationLevel
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow
from psycopg.waiting import Ready, Wait
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from bufstore.errors import ConfigError, StoreMisconfigured, StoreUnavailable
from bufstore.home import Home, owned_here
from bufstore.postgres.connection.alarm import Alarm
from bufstore.postgres.connection.conninfo import own_conninfo
from bufstore.postgres.connection.errors import Unconfirmed, hung_up, is_lost, map_errors, out_of_time
from bufstore.postgres.connection.primary import PASSED_OFF, to_the_primary
from bufstore.postgres.connection.quiet import WAITING, Ours, quieten
from bufstore.postgres.connection.refusals import is_refusal, reason_in
from bufstore.postgres.connection.session import ask
from bufstore.tasks import Closing, spawn, to_the_end

#: The advice when a store is opened again, or by another one.
ANOTHER = "make a new one each time you open a store or a saver"
#: How long a waiting call leaves the pool alone before it asks again, which makes the pool try to connect again.
_NUDGE_S = 0.5
#: How long the statement of a cancelled caller may take to end.
_CANCELLED_S = 1.0
#: How long a closing pool waits for its own tasks, which take back the lent connections.
_CLOSE_S = 1.0
#: A connection goes from caller to caller for this many seconds; then the pool checks whether it is too old.
_HANDED_ON_S = 60.0


_POOL_NAME = "bufstore"
quieten(_POOL_NAME)


class _Failure:
    """The last failure to connect, until it succeeds again; and the tasks that are connecting."""

    reason: str | None = None
    #: Whether what libpq took for the primary was a standby. Its next choice is asked, until one is the primary.
    doubted = False

    def __init__(self) -> None:
        self.connecting: set[asyncio.Task[Any] | None] = set()

    def raise_refusal(self) -> None:
        if self.reason is not None and is_refusal(self.reason):
            raise StoreMisconfigured(f"Postgres, or its client, refuses the connection: {self.reason}") from None


class _Connection(AsyncConnection[TupleRow], Ours):
    #: The number of connections that this process has made.
    made = 0

    @classmethod
    async def connect(cls, conninfo: str = "", *, failure: _Failure, **kwargs: Any) -> Self:  # type: ignore[override]
        task = asyncio.current_task()
        failure.connecting.add(task)
        try:
            made = partial(cls._made, **kwargs)
            connection, confirmed = await to_the_primary(made, conninfo, failure.doubted)
            failure.doubted = failure.doubted and not confirmed
        except psycopg.OperationalError as e:
            failure.reason = reason_in(str(e))
            raise
        finally:
            failure.connecting.discard(task)
        failure.reason = None
        owned_here(connection)
        connection.ready = True
        _Connection.made += 1
        # This is for transactions that psycopg begins; for the others see `Pool._is_usable`.
        await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
        return connection

    @classmethod
    async def _made(cls, conninfo: str, **kwargs: Any) -> Self:
        clock = asyncio.get_running_loop().time
        began = clock()
        connection = await super().connect(conninfo, **kwargs)
        connection.made_in_s = clock() - began
        return connection

    #: How many seconds it took to make the connection.
    made_in_s: float
    #: Whether it is somebody's to use. Until then its statement is given up at once: a closing pool waits for it.
    ready = False
    #: Whether each statement may be a transaction of its own, as the server said; None: it was not asked yet. Asked for
    #: each connection: the default of role or database may be changed while a process runs.
    single: bool | None = None
    #: When the connection was last got from the pool, in the event loop's time.
    lent_at: float = 0.0
    #: The alarm of the block that the connection is lent to; None while it is not lent.
    alarm: Alarm | None = None

    async def wait(self, *given: Any, **named: Any) -> Any:
        token = WAITING.set(True)
        try:
            return await super().wait(*given, **named)
        finally:
            WAITING.reset(token)

    async def _try_cancel(self, *, timeout: float = 5.0) -> None:
        """Cancel as psycopg does when a statement's task is cancelled; then psycopg waits up to ten seconds.

        When Postgres hangs, a caller that has given up must not wait longer than one whose time is over.

        A task may be cancelled again while the cancel request is on its way: anyio does so at every turn of the loop.
        psycopg would hang up at once, and the statement would go on in the server, beside the next connection.
        """
        if not self.ready:
            self._hang_up()
        if self.alarm is not None:
            self.alarm.ring_in(_CANCELLED_S)
        loop = asyncio.get_running_loop()
        ends_at, again = loop.time() + _CANCELLED_S, False
        request = spawn(super()._try_cancel(timeout=min(timeout, _CANCELLED_S)))
        while not request.done() and (left_s := ends_at - loop.time()) > 0:
            try:
                await asyncio.wait([request], timeout=left_s)
            except asyncio.CancelledError:
                again = True
        if again:
            self._hang_up()

    def _hang_up(self) -> NoReturn:
        """End a cancelled statement whose end nobody can wait for.

        psycopg takes this error as expected, and raises the first CancelledError; it would warn of any other.
        """
        self.pgconn.finish()
        raise psycopg.errors.QueryCanceled

    @asynccontextmanager
    async def pipeline(self) -> AsyncIterator[AsyncPipeline]:
        """Begin psycopg's pipeline, but without the request to flush that psycopg sends behind the last sync.

        Postgres takes that request for the next statement, which ends its `idle_in_transaction_session_timeout`: a
        process that stops behind a pipeline would hold its locks forever.
        """
        async with super().pipeline() as pipeline:
            pipeline._exit_gen = partial(_end, pipeline)  # type: ignore[method-assign]
            yield pipeline


def _end(pipeline: AsyncPipeline) -> Generator[Any, Any, None]:
    """Send a sync, and fetch everything that is still to come."""
    try:
        pipeline._enqueue_sync()
        yield from pipeline._communicate_gen()
        # The socket may not have taken all of a large statement, and `_fetch_gen` waits for answers only.
        while pipeline.pgconn.flush():
            if (yield Wait.RW) & Ready.R:
                pipeline.pgconn.consume_input()
    finally:
        yield from pipeline._fetch_gen(flush=False)


def connections_made() -> int:
    """Return how many connections to Postgres this process has made, in all pools."""
    return _Connection.made


class _UntilCancelled:
    """The queue of a task that goes on after its cancellation: the task gets nothing more to do."""

    def __init__(self, queue: asyncio.Queue[Any]) -> None:
        self._queue = queue

    async def get(self) -> Any:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        return await self._queue.get()


class Pool(AsyncConnectionPool[_Connection]):
    """An `AsyncConnectionPool` with one more way to borrow: `lend`.

    While all connections are lent, a returned one goes to the next caller at once, past the pool, whose locks and tasks
    cost more than a small statement. A caller that waits in the pool itself comes first, because it came earlier.
    """

    def __init__(self, conninfo: str, *, size: int, connect_timeout_s: float) -> None:
        self._failure = _Failure()
        self._closing = Closing()
        self._home: Home | None = None
        #: How many callers of `lend` have a connection or wait for the pool to give one, and how many of these wait.
        self._lent = self._asking = 0
        #: Callers that wait for a place. Each gets the place with its connection; or None: the connection is gone.
        self._next: deque[asyncio.Future[_Connection | None]] = deque()
        #: Those among them that come before the others.
        self._first: deque[asyncio.Future[_Connection | None]] = deque()
        defaults: dict[str, Any] = {
            "connect_timeout": max(2, round(connect_timeout_s)),
            "application_name": "bufstore",
            # A server whose host is gone says nothing: the system's defaults notice that after two hours.
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
        }
        super().__init__(
            own_conninfo(conninfo, **defaults),
            connection_class=_Connection,
            kwargs={"autocommit": True, "prepare_threshold": None, "failure": self._failure},
            min_size=min(2, size),
            max_size=size,
            open=False,
            name=_POOL_NAME,
            # The pool's own back-off would go on sleeping for minutes when Postgres is back: see `_live`.
            reconnect_timeout=0,
        )

    @classmethod
    async def worker(cls, q: Any) -> None:
        """Run a worker. Cancelling it ends it even while it connects: psycopg_pool takes that for a failed connect.

        Otherwise a program that does not close its store would never end: `asyncio.run` waits for every task.
        """
        with suppress(asyncio.CancelledError):  # otherwise asyncio reports it, if the pool no longer waits for the end
            await super().worker(_UntilCancelled(q))  # type: ignore[arg-type]

    async def open(self, wait: bool = False, timeout: float = 30.0) -> None:
        """Open the pool, if it is not open. Raises ConfigError when it was closed, or is open on another event loop."""
        self.check_home()
        if self.closed:
            self._home = Home()
        try:
            await super().open(wait, timeout)
        except PoolClosed:
            raise ConfigError(f"this store was closed: {ANOTHER}") from None

    async def close(self, timeout: float = _CLOSE_S) -> None:
        """Close the pool. Its own tasks that still try to connect are ended, the others are waited for shortly.

        Raises like `closes_here`, and does nothing where that is false.
        """
        if self.closes_here():
            for task in self._workers:
                if task in self._failure.connecting:
                    task.cancel()
            await self._closing(partial(super().close, timeout))

    async def _signal_stop_worker(self) -> list[asyncio.Task[Any]]:
        # One that somebody has cancelled would end the close before it closes the connections.
        tasks = await super()._signal_stop_worker()
        return [spawn(asyncio.wait([task]), name=task.get_name()) for task in tasks]

    def closes_here(self) -> bool:
        """Return False in a process that was forked off. Raises ConfigError on another loop, unless it is closed."""
        return self._home is None or (self.closed and not self._home.left) or self._home.closes_here()

    def check_home(self) -> None:
        """Raise ConfigError on another event loop than the one that the pool is open on, and in a forked process."""
        if self._home is not None and not self.closed:
            self._home.check()

    @asynccontextmanager
    async def lend(self, timeout_s: float, away_s: float | None = None) -> AsyncIterator[AsyncConnection[TupleRow]]:
        """Lend a live connection for the block, which ends (and the connection is back) after `timeout_s` at most.

        `away_s`: how long to wait for a Postgres that cannot be reached, for a caller on whom others wait. It comes
        before other callers: a long queue is no outage. None: `timeout_s`, which rides out a restart.

        Errors in the block are mapped (`bufstore.postgres.connection.errors`). Raises StoreUnavailable when no
        connection could be had (the block did not begin), NoAnswer when the connection or the time ended in the block,
        StoreMisconfigured when Postgres refuses the login, ConfigError on another event loop, Closed.
        """
        self.check_home()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        away_at = deadline if away_s is None else loop.time() + away_s
        usable = False
        with map_errors():
            while not usable:
                connection = await self._borrow(deadline, away_at, away_s is not None)
                # The alarm ends the statement. The limit ends anything else that the block waits for.
                limit = asyncio.timeout(None)
                alarm = connection.alarm = Alarm(connection, deadline, limit, connection.made_in_s)
                try:
                    async with limit, connection:
                        usable = await self._is_usable(connection)
                        if usable:
                            yield connection
                except Exception as e:
                    if _is_read_only(e):
                        # A session may stay read-only when its server is not, and the address may lead elsewhere now.
                        await connection.close()
                    if alarm.rung and isinstance(e, psycopg.errors.QueryCanceled):
                        raise out_of_time(timeout_s) from e  # Postgres would say that the user asked for it
                    if alarm.rung and is_lost(e):
                        raise hung_up(timeout_s) from e
                    raise
                else:
                    if usable and alarm.rung:
                        raise Unconfirmed
                finally:
                    connection.alarm = None
                    if alarm.off():
                        # The cancel request may still be under way: it must not hit the next caller's statement.
                        await connection.close()
                    await self._end_loan(connection)

    async def _is_usable(self, connection: _Connection) -> bool:
        """Make each statement read committed, whatever the role's default: one that waited for a row sees its change.

        Return False, and close it, if it leads to a standby that a pooler has passed off as the primary.

        Where the default is another level, psycopg begins a transaction for each loan. A setting of the session would
        be lost behind a pooler, which also refuses a setting that comes with the connection.
        """
        if connection.single is None:
            session = await ask(connection)
            if session.standby:
                self._failure.doubted, self._failure.reason = True, PASSED_OFF
                await connection.close()
                return False
            connection.single = session.read_committed
        if connection.autocommit is not connection.single:
            await connection.set_autocommit(connection.single)
        return True

    async def _borrow(self, deadline: float, away_at: float, first: bool) -> _Connection:
        """Take a place among the callers that are lent to; return a live connection. `away_at`: see `_live`."""
        if self._lent >= self.max_size:
            handed = await self._wait_turn(deadline, away_at, first)
            if handed is not None:
                return handed
        else:
            self._lent += 1
        self._asking += 1
        try:
            connection = await self._live(deadline, away_at)
        except BaseException as e:
            if isinstance(e, StoreMisconfigured):
                self._refuse_all(str(e))
            self._free_place()
            raise
        finally:
            self._asking -= 1
        connection.lent_at = asyncio.get_running_loop().time()
        return connection

    async def _wait_turn(self, deadline: float, away_at: float, first: bool) -> _Connection | None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[_Connection | None] = loop.create_future()
        timers = [loop.call_at(deadline, self._too_late, turn)]
        if away_at < deadline:
            timers.append(loop.call_at(away_at, self._away, turn))
        (self._first if first else self._next).append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                handed = turn.result()  # its turn had come
                if handed is not None:
                    await self._end_loan(handed)
                else:
                    self._free_place()
            raise
        finally:
            for timer in timers:
                timer.cancel()

    def _away(self, turn: asyncio.Future[_Connection | None]) -> None:
        if self._failure.reason:
            self._too_late(turn)
        elif not turn.done():  # those before it may still find out: look again, as `_live` does
            asyncio.get_running_loop().call_later(_NUDGE_S, self._away, turn)

    def _too_late(self, turn: asyncio.Future[_Connection | None]) -> None:
        if not turn.done():
            turn.set_exception(self._not_in_time())

    def _refuse_all(self, reason: str) -> None:
        """Refuse all waiting callers, so that each need not find out alone."""
        while waiting := self._first or self._next:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_exception(StoreMisconfigured(reason))

    def _not_in_time(self) -> StoreUnavailable:
        in_use = self._lent - self._asking >= self.max_size
        reason = "all connections are in use" if in_use else "it does not answer a new connection"
        return StoreUnavailable(f"no connection to Postgres in time: {self._failure.reason or reason}")

    async def _end_loan(self, connection: _Connection) -> None:
        """Hand the connection on to the next caller, or give it back."""
        fresh = asyncio.get_running_loop().time() - connection.lent_at < _HANDED_ON_S
        idle = connection.pgconn.transaction_status == TransactionStatus.IDLE
        if fresh and idle and not self._asking and not self.closed and self._give_turn(connection):
            return
        try:
            # This also runs after a cancellation: the pool rolls back what is open, or drops the connection.
            await self._give_back(connection)
        finally:
            self._free_place()

    def _free_place(self) -> None:
        if not self._give_turn(None):
            self._lent -= 1

    def _give_turn(self, connection: _Connection | None) -> bool:
        while waiting := self._first or self._next:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(connection)
                return True
        return False

    async def take(self, timeout_s: float) -> AsyncConnection[TupleRow]:
        """Return a live connection, which the caller closes and then gives back with `putconn`. Raises like `lend`."""
        self.check_home()
        with map_errors():
            deadline = asyncio.get_running_loop().time() + timeout_s
            return await self._live(deadline, deadline)

    async def _live(self, deadline: float, away_at: float) -> _Connection:
        """Return a live connection. From `away_at` on, the last failure to connect ends the wait."""
        loop = asyncio.get_running_loop()
        while True:
            left = (away_at if self._failure.reason else deadline) - loop.time()
            try:
                connection = await self.getconn(min(left, _NUDGE_S))
            except PoolTimeout:
                # When it is asked again, the pool tries to connect again: a Postgres that is back is noticed at once.
                self._failure.raise_refusal()
                self._forget_timed_out()
                if left <= _NUDGE_S:
                    raise self._not_in_time() from None
                continue
            if _is_alive(connection):
                return connection
            await self._give_back(connection)

    def _forget_timed_out(self) -> None:
        """Forget who has timed out: psycopg's pool keeps each until a connection comes, which an outage has none of."""
        while self._waiting and self._waiting[0].error is not None:
            self._waiting.popleft()

    async def _give_back(self, connection: _Connection) -> None:
        """Return a connection, even if the caller is cancelled meanwhile: otherwise the pool would lose it forever."""
        await to_the_end(self.putconn(connection))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.max_size} connections>"


async def open_pool(conninfo: str, *, size: int = 16, connect_timeout_s: float = 5.0) -> Pool:
    """Return an open pool of up to `size` connections. Postgres need not be up: the first call to need it says so."""
    pool = new_pool(conninfo, size=size, connect_timeout_s=connect_timeout_s)
    await pool.open(wait=False)
    return pool


def new_pool(conninfo: str, *, size: int = 16, connect_timeout_s: float = 5.0) -> Pool:
    """Return a pool that is not open yet. Raises ConfigError when `conninfo` is invalid; the error does not show it."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"the size of a pool must be a whole number, at least 1 connection, not {size!r}")
    return Pool(conninfo, size=size, connect_timeout_s=connect_timeout_s)


async def connect(conninfo: str, **options: Any) -> AsyncConnection[TupleRow]:
    """Return a connection of no pool. Raises StoreMisconfigured when Postgres refuses the login, StoreUnavailable."""
    failure = _Failure()
    with suppress(psycopg.OperationalError):  # `failure` says why
        return await _Connection.connect(conninfo, failure=failure, **options)
    failure.raise_refusal()
    raise StoreUnavailable(f"no connection to Postgres: {failure.reason}")


def _is_alive(connection: AsyncConnection[Any]) -> bool:
    """Return False when the server has closed this idle connection: read what has arrived, without waiting."""
    try:
        # Twice: a server that ends a session says so first, and libpq sees the end only when it reads on.
        connection.pgconn.consume_input()
        connection.pgconn.consume_input()
    except psycopg.Error:
        return False
    return not connection.closed


def _is_read_only(error: BaseException) -> bool:
    return any(isinstance(e, psycopg.errors.ReadOnlySqlTransaction) for e in (error, error.__cause__))
