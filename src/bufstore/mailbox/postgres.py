"""A mailbox in Postgres: each step is one statement, whose compare-and-set is on the thread's row.

Workers find threads with work by a query that skips the rows that others hold (``pull`` in sql/signals.sql); a notifier
tells them when to ask, and without one they poll.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

import msgspec
import psycopg
from msgspec.structs import replace
from psycopg import sql

from bufstore.elapsed import since_start_s
from bufstore.errors import Closed, MalformedEntry, StepUnknown
from bufstore.jetstream.messages import AppendUnknown, Conflict
from bufstore.log_lines import LogLines
from bufstore.mailbox.config import MailboxConfig
from bufstore.mailbox.counters import MailboxGauges
from bufstore.mailbox.decisions import Claiming, Step, claimed, clock_ahead
from bufstore.mailbox.model import Dispatch, MailboxThread, Status, numbered
from bufstore.mailbox.ports import Backend, InSteps, KeyTaken, Signal
from bufstore.mailbox.store import MailboxStore
from bufstore.notify.idle import WhileIdle
from bufstore.notify.notifier import Notifier
from bufstore.postgres.connection import arrays
from bufstore.postgres.connection.conninfo import opened_within
from bufstore.postgres.connection.errors import NoAnswer, Unconfirmed
from bufstore.postgres.connection.migrate import check_schema, migrate, queries
from bufstore.postgres.connection.pool import Pool, new_pool
from bufstore.takes import Takes
from bufstore.tasks import end, set_within, spawn

_log = LogLines(__name__)

_FOLDER = files("bufstore.mailbox") / "sql"
#: The statuses as numbers, in the order of the enum: 0 queued, 1 claimed, above finished.
_NUMBERS = {status: n for n, status in enumerate(Status)}
_STATUSES = list(Status)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Dispatch).decode
_decode_claiming = msgspec.msgpack.Decoder(Claiming).decode
#: The most waiting threads that are counted.
_COUNTED = 10_000
#: Outcomes of ``claim``.
_SUPERSEDED, _MOVED = 0, 2


#: How far a worker may be behind Postgres' clock: see signals.sql.
_BEHIND_MAX_MS = 1000


class PostgresBackend(Backend):
    """See `bufstore.mailbox.ports.Backend`."""

    def __init__(
        self, pool: Pool, schema: str, config: MailboxConfig, *, owns_pool: bool, notifier: Notifier | None
    ) -> None:
        self._pool = pool
        self._schema = check_schema(schema)
        self._sql = queries(_FOLDER, schema)
        self._numbers = sql.Identifier(schema, "mailbox_numbers").as_string()
        self._timeout_s = config.timeout_s
        self._ack_wait_s = config.signal_ack_wait_s
        self._patience_ms = round(1000 * (config.signal_ack_wait_s + config.signal_nack_max_delay_s))
        #: The last thread that was looked at for a lost signal; empty when a new round begins.
        self._looked = ""
        self._owns_pool = owns_pool
        self._notifier = notifier
        self._kind = f"mailbox of {schema}"
        self._news = asyncio.Event()
        self._idle = WhileIdle(notifier, [self._kind], lambda _: self._news.set())
        self._telling: asyncio.Task[None] | None = None
        self._untold = 0
        #: The server's clock minus ours, in milliseconds. No step of the wall clock moves ours.
        self._offset_ms = 0.0
        self._open = False
        self._takes = Takes()
        #: How many calls wait for signals.
        self._pulls = 0

    async def open(self) -> None:
        if self._owns_pool:
            await self._pool.open(wait=False)
        within_s = opened_within(self._pool.conninfo, self._timeout_s)
        try:
            async with self._pool.lend(within_s, self._timeout_s) as connection:
                await migrate(connection, self._schema, _FOLDER, "mailbox")
            self._open = True
            await self._set_clock()
        except BaseException:
            await self.aclose()
            raise

    def closes_here(self) -> bool:
        return self._pool.closes_here()

    async def aclose(self) -> None:
        if not self.closes_here():  # `open` has failed in a forked process
            return
        await self._takes.aclose()
        self._open = False
        self._news.set()
        await end(self._telling)
        await self._idle.end()
        if self._owns_pool:
            await self._pool.close()

    async def _set_clock(self) -> None:
        asked_at = 1000 * since_start_s()
        theirs = (await self._run("clock"))[0][0]
        self._offset_ms = clock_ahead(self._offset_ms, theirs, asked_at, 1000 * since_start_s())

    def now_ms(self) -> int:
        # No step of the wall clock moves this one, and it goes on while the machine is suspended.
        return round(1000 * since_start_s() + self._offset_ms)

    @asynccontextmanager
    async def _lent(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        if not self._open:
            raise Closed("the mailbox is closed or not open")
        async with self._pool.lend(self._timeout_s) as connection:
            yield connection

    async def _run(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        async with self._lent() as connection:
            return await arrays.rows_of(connection, self._sql[name], parameters)

    async def _step(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a write; without an answer it may have been done. Raises AppendUnknown, StepUnknown."""
        try:
            return await self._run(name, *parameters)
        except Unconfirmed as e:  # a read would find the write, which would prove nothing
            raise StepUnknown(f"the step got no answer: {e}") from e
        except NoAnswer as e:
            raise AppendUnknown(str(e)) from e

    async def add(self, dispatch: Dispatch, *, own_id: bool, now_ms: int) -> Dispatch:
        d, look_at = dispatch, max(dispatch.available_at_ms, now_ms)
        queued = d.priority, d.dedupe_key, d.available_at_ms, _encode(d)
        try:
            rows = await self._step("add", d.thread_id, d.dispatch_id, *queued, self._numbers, look_at)
        except psycopg.errors.UniqueViolation as e:
            same_id = e.diag.constraint_name == "mailbox_dispatch"
            raise KeyTaken(d.dispatch_id if same_id else await self._holder(d), same_id=same_id) from None
        if d.available_at_ms <= now_ms:
            self._tell()
        return replace(d, position=rows[0][0], epoch=rows[0][1])

    def _tell(self) -> None:
        """Notify workers in the background: nobody waits for it, and if it fails, what was stored is stored."""
        self._news.set()
        self._untold += 1
        if self._notifier is not None and (self._telling is None or self._telling.done()):
            self._telling = spawn(self._tell_all(self._notifier), name="bufstore-mailbox-tell")

    async def _tell_all(self, notifier: Notifier) -> None:
        with suppress(Closed):
            while self._untold:
                count, self._untold = self._untold, 0
                await notifier.notify_scheduled(self._kind, count)

    async def _holder(self, d: Dispatch) -> str:
        """Return the holder of the dedupe key; if the key is free again, an id that does not exist."""
        rows = await self._run("holder", d.thread_id, d.dedupe_key)
        return str(rows[0][0]) if rows else d.dispatch_id

    async def write(self, before: MailboxThread, step: Step, now_ms: int) -> MailboxThread:
        thread, active = step.thread, step.thread.active
        changed = [(m.after, Status.QUEUED if m.before else Status.CLAIMED) for m in step.moves if m.after is not None]
        if active is not None and active != before.active:
            changed.append((active, Status.QUEUED if before.active is None else Status.CLAIMED))
        held = (active.dispatch_id, active.lease_until_ms) if active is not None else (None, None)
        columns = (
            arrays.texts(d.dispatch_id for d, _ in changed),
            arrays.ints(_NUMBERS[was] for _, was in changed),
            arrays.ints(_NUMBERS[d.status] for d, _ in changed),
            arrays.longs(d.available_at_ms for d, _ in changed),
            arrays.longs(d.completed_at_ms for d, _ in changed),
            arrays.longs(d.token for d, _ in changed),
            arrays.blobs([_encode(d) for d, _ in changed]),
        )
        of_thread = thread.thread_id, before.version, thread.epoch, thread.step, *held
        try:
            wake_at = self.now_ms() if step.wake else None
            rows = await self._step("write", *of_thread, wake_at, *columns, self._numbers)
        except psycopg.errors.DivisionByZero:
            raise Conflict("the queue has moved") from None
        if not rows:
            raise Conflict("the thread has moved")
        if step.wake:
            self._tell()
        return numbered(thread, rows[0][0])

    async def claim_first(self, thread_id: str, claiming: Claiming, step_id: str) -> MailboxThread | None:
        c = claiming
        rows = await self._step("claim", thread_id, c.now_ms, step_id, _encode(c), c.lease_until_ms, self._numbers)
        if not rows:
            return None
        outcome, version, epoch, *active = rows[0]
        if outcome == _SUPERSEDED:
            raise InSteps
        if outcome == _MOVED:
            raise Conflict("the thread has moved")
        try:
            return _state(thread_id, [(version, epoch, step_id, *active)])
        except MalformedEntry as e:
            await self._set_aside(thread_id, version, e)
            raise Conflict("the claimed dispatch cannot be read") from e

    async def _set_aside(self, thread_id: str, version: int, error: MalformedEntry, at: int | None = None) -> None:
        """Mark a dispatch dead, because it cannot be read, so that the thread goes on.

        `at`: its position in the queue; None: it is the claimed one.
        """
        _log.warning("thread %r: %s; marking the dispatch dead", thread_id, error, extra={"action": "mailbox_foreign"})
        await self._run("set_aside", thread_id, version, self.now_ms(), self._numbers, _NUMBERS[Status.DEAD], at)

    async def thread(self, thread_id: str) -> MailboxThread:
        return _state(thread_id, await self._run("thread", thread_id))

    async def first(self, thread_id: str, now_ms: int) -> tuple[MailboxThread, Dispatch | None]:
        rows = await self._run("queue", thread_id, now_ms)
        thread = _state(thread_id, rows)
        try:
            return thread, _beside(rows)
        except MalformedEntry as e:
            await self._set_aside(thread_id, thread.version, e, rows[0][10])
            raise Conflict("the first dispatch of the queue cannot be read") from e

    async def find(self, thread_id: str, dispatch_id: str) -> tuple[MailboxThread, Dispatch | None]:
        rows = await self._run("find", thread_id, dispatch_id)
        return _state(thread_id, rows), _beside(rows)

    async def queued(self, thread_id: str, below_epoch: int, limit: int) -> list[Dispatch]:
        return _readable(await self._run("queued", thread_id, below_epoch, limit))

    async def all_of(self, thread_id: str) -> tuple[MailboxThread, list[Dispatch]]:
        rows = await self._run("all_of", thread_id)
        dispatches = _readable(row[9:15] for row in rows)
        active = next((d for d in dispatches if d.status is Status.CLAIMED), None)
        rest = [d for d in dispatches if d is not active]
        return replace(_state(thread_id, rows), active=active), rest

    async def queued_threads(self, limit: int) -> list[str]:
        return [row[0] for row in await self._run("queued_threads", limit)]

    async def finished(self, limit: int) -> list[Dispatch]:
        return _readable(await self._run("finished", limit))

    async def counts(self) -> dict[Status, int]:
        rows = await self._run("counts", _NUMBERS[Status.SUPERSEDED])
        return dict.fromkeys(Status, 0) | {_STATUSES[number]: count for number, count in rows}

    async def purge(self, finished_before_ms: int, limit: int) -> int:
        # In one transaction: nobody would remove a thread that is left when this is broken off in between.
        async with self._lent() as connection, connection.transaction():
            purged = await arrays.rows_of(connection, self._sql["purge"], (finished_before_ms, limit))
            if purged:
                threads = arrays.texts({row[0] for row in purged})
                await arrays.rows_of(connection, self._sql["purge_threads"], (threads,))
        return len(purged)

    async def expiring(self, now_ms: int, limit: int) -> list[MailboxThread]:
        expired = []
        for row in await self._run("expiring", now_ms, limit):
            try:
                expired.append(_state(row[9], [row]))
            except MalformedEntry as e:
                await self._set_aside(row[9], row[0], e)
        return expired

    async def wake(self, thread_id: str) -> None:
        await self._step("wake", thread_id, self.now_ms(), self._numbers)
        self._tell()

    async def signal_lost(self, due_ms: int, limit: int) -> int:
        # A worker that pulls a signal, or hands it back, puts the next look no later than this.
        late = self.now_ms() + self._patience_ms
        rows = await self._run("signal_lost", self._looked, limit, due_ms, late, self._numbers)
        self._looked = rows[-1][0] if len(rows) >= limit else ""
        return sum(signalled for _, signalled in rows)

    async def gauges(self) -> MailboxGauges:
        ((count, first),) = await self._run("gauges", self.now_ms(), _COUNTED)
        since = None if first is None else max(0, self.now_ms() - first) / 1000
        return MailboxGauges(oldest_queued_s=since, signals_waiting=count)

    async def held(self, thread_ids: Sequence[str]) -> dict[str, tuple[int, int, int]]:
        return {row[0]: (row[1], row[2], row[3]) for row in await self._run("held", arrays.texts(thread_ids))}

    async def sweeps(self, interval_s: float) -> bool:
        await self._set_clock()
        return bool(await self._run("sweeps", interval_s / 2))

    async def signals(self, limit: int, timeout_s: float) -> list[Signal]:
        self._pulls += 1
        try:
            return await self._signals(limit, time.monotonic() + timeout_s)
        except BaseException:
            # The worker ends, or pauses: it must not take calls that are meant for one worker.
            if self._pulls == 1:
                try:
                    await self._idle.end()
                finally:  # anyio cancels again and again
                    if self._news.is_set():
                        self._tell()
            raise
        finally:
            self._pulls -= 1

    async def _signals(self, limit: int, deadline: float) -> list[Signal]:
        while True:
            self._news.clear()
            rows = await self._pull(limit)
            left = deadline - time.monotonic()
            if rows or left <= 0:
                return [Signal(self, *row) for row in rows]
            with suppress(Closed):  # the notifier is closed: polling goes on
                if await self._idle.begin():
                    continue  # look again: nobody tells of what came before
            await set_within(self._news, left)

    async def _pull(self, limit: int) -> list[Any]:
        async def pulling() -> list[Any]:
            rows = await self._run("pull", self.now_ms(), limit, round(1000 * self._ack_wait_s))
            if rows:
                # What is due by Postgres' clock must be so by ours, too, or it could not be claimed. If it is ahead by
                # more, it was set.
                behind_ms = rows[0][3] - self.now_ms()
                self._offset_ms += behind_ms if 0 < behind_ms <= _BEHIND_MAX_MS else 0
                await self._idle.end()
            return [row[:3] for row in rows]

        return await self._takes.take(pulling(), self._put_back)

    async def _put_back(self, rows: list[Any]) -> None:
        """Put back signals that were pulled for nobody: they would come to nobody until their time is over."""
        for row in rows:
            await self.put_off(Signal(self, *row), 0)

    async def ack_signal(self, signal: Signal) -> bool:
        with suppress(NoAnswer):
            return await self._run("signal_ack", signal.thread_id, signal.mark) != [(False,)]
        return True

    async def put_off(self, signal: Signal, delay_s: float | None) -> None:
        wake_at = self.now_ms() + round(1000 * (self._ack_wait_s if delay_s is None else delay_s))
        with suppress(NoAnswer):
            await self._run("signal_nack", signal.thread_id, signal.mark, wake_at)
        signal.mark = wake_at


def _state(thread_id: str, rows: Sequence[Sequence[Any]]) -> MailboxThread:
    """Return the thread of the first row, if there is one: version, epoch, step and active dispatch."""
    if not rows or rows[0][0] is None:
        return MailboxThread(thread_id=thread_id)
    version, epoch, step = rows[0][:3]
    active = _dispatch(rows[0][3:9]) if rows[0][3] is not None else None
    return MailboxThread(thread_id=thread_id, version=version, epoch=epoch, step=step, active=active)


def _beside(rows: Sequence[Sequence[Any]]) -> Dispatch | None:
    """Return the dispatch that the first row has beside the thread."""
    return _dispatch(rows[0][9:15]) if rows and rows[0][9] is not None else None


def _readable(rows: Iterable[Sequence[Any]]) -> list[Dispatch]:
    """Return the dispatches that can be read; log the rest."""
    dispatches = []
    for row in rows:
        try:
            dispatches.append(_dispatch(row))
        except MalformedEntry as e:
            _log.warning("%s", e, extra={"action": "mailbox_foreign"})
    return dispatches


def _dispatch(row: Sequence[Any]) -> Dispatch:
    record, position, epoch, status, token, claim = row
    try:
        d = replace(_decode(record), position=position, epoch=epoch)
        if claim is not None:  # the record is as it was in the queue
            return claimed(d, _decode_claiming(claim), token)
    except msgspec.MsgspecError as e:
        raise MalformedEntry(f"the record at position {position} does not belong to a mailbox: {e}") from None
    return replace(d, status=_STATUSES[status], token=token)


class PostgresMailboxStore(MailboxStore):
    """A `MailboxStore` in Postgres ≥ 15. `conninfo` and `schema` as for `PostgresThreadStore`.

    `notifier`: a `bufstore.notify.Notifier`, which the app closes; with it, workers need not wait for their next poll.
    `pool`: the pool of another store, to be shared. Opening creates or upgrades the tables; raises ConfigError,
    StoreUnavailable, StoreMisconfigured.
    """

    def __init__(
        self,
        conninfo: str = "",
        *,
        schema: str = "bufstore",
        pool_size: int = 16,
        pool: Pool | None = None,
        notifier: Notifier | None = None,
        config: MailboxConfig | None = None,
    ) -> None:
        config = config or MailboxConfig()
        chosen = pool or new_pool(conninfo, size=pool_size, connect_timeout_s=config.timeout_s)
        super().__init__(PostgresBackend(chosen, schema, config, owns_pool=pool is None, notifier=notifier), config)
