"""A look at the buffer from outside: who flushes, how far, how full the log is. Changes and makes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import msgspec

from bufstore.buffer.flush.flusher_state import told_by_flushers
from bufstore.buffer.flush.lease import living
from bufstore.buffer.flush.membership import owners
from bufstore.buffer.operate.audit import Finding, Verification
from bufstore.buffer.operate.health import asked, health_of, is_full
from bufstore.buffer.operate.log_fill import FillForecast, look
from bufstore.buffer.ports.ledger import Cursor
from bufstore.buffer.ports.waiting import WaitingTotals
from bufstore.buffer.prepare import apart
from bufstore.buffer.target import check_same
from bufstore.cli.connect import AnyBuffer, Endpoints
from bufstore.config import BufferConfig
from bufstore.errors import (
    BufstoreError,
    ConfigError,
    LogRolledBack,
    LogUnavailable,
    NoLog,
    StoreMisconfigured,
    StoreUnavailable,
)
from bufstore.tasks import end, spawn

_TIMEOUT_S = 5.0


class Partition(msgspec.Struct, kw_only=True):
    """How far one partition is flushed, and by whom."""

    partition: int
    #: The position of the partition's last entry in the log; 0: there is none.
    end: int
    #: The partition's cursor, and its owner's term; 0: there is none yet; None: Postgres could not be asked.
    cursor: int | None
    term: int | None
    #: How many of its entries in the log the cursor has not passed; None: Postgres could not be asked.
    lag: int | None
    #: The live flusher that owns the partition; None: none is alive.
    owner: str | None


class BufferStatus(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore status --json``."""

    #: False when something below is wrong, as in `Health`.
    ok: bool
    #: Why Postgres cannot be asked; empty: it can.
    postgres_trouble: str
    stream: str
    #: The number of the log's lane (the first is 0), and how many lanes there are.
    lane: int
    lanes: int
    log_bytes: int
    log_bytes_max: int
    #: About how many of the log's bytes are not flushed.
    log_bytes_unflushed: int
    #: After how many seconds, at least, the log is full at the present rate; None: its unflushed part does not grow.
    log_full_in_s: float | None
    #: What is wrong with the log; also what lets entries be lost, and stops no write now.
    log_trouble: str
    #: As in `Health`, for a process with these settings; each trouble says why the answer above it is False.
    can_write: bool
    write_trouble: str
    can_read: bool
    read_trouble: str
    flushing: bool
    flush_trouble: str
    #: How many entries in the log, of all partitions, no cursor has passed; None: Postgres could not be asked.
    lag: int | None
    #: The average size of the log's last groups, in entries and in bytes; None: there are no groups.
    group_entries: float | None
    group_bytes: float | None
    #: How many entries wait in the ledger, of how many threads, their bytes, since when, and the commonest reason;
    #: None: Postgres could not be asked.
    waiting: WaitingTotals | None
    #: How many entries are in quarantine; None: Postgres could not be asked.
    quarantined: int | None
    #: The live flushers.
    members: list[str]
    partitions: list[Partition]


class Inspection:
    """A buffer that is connected to NATS, and to Postgres if Postgres is up."""

    def __init__(self, buffer: AnyBuffer) -> None:
        self._buffer = buffer
        self._log, self._shared, self._ledger = buffer.log, buffer.shared, buffer.ledger
        #: The entries in quarantine.
        self.quarantine = buffer.quarantine

    async def verify(self) -> Verification:
        """Run the self-check. Raises LogUnavailable, StoreUnavailable."""
        why = await self._apart()  # this also learns where this generation of the stream begins
        found = await self._buffer.verify()
        if why is None:
            return found
        first = Finding(rule="log and Postgres", detail=why.reason, partition=None)
        return msgspec.structs.replace(found, wrong=found.wrong + 1, findings=(first, *found.findings))

    async def _apart(self, *, checked: bool = True) -> LogRolledBack | None:
        """Return why every store refuses to open here; None: none refuses. `checked`: see `apart`."""
        named = self._log.target
        kind = named.kind if named is not None else self._buffer.backing.kind
        try:
            return await apart(self._log, self._ledger, self._buffer.config.log, kind, checked=checked)
        except LogRolledBack as e:  # a repair has begun
            return e

    async def members(self) -> list[str]:
        """The live flushers. Raises LogUnavailable."""
        return await living(self._shared)

    async def status(self) -> BufferStatus:
        """Return where everything stands, and what cannot be asked. Raises LogUnavailable when NATS goes away."""
        # Records stay where the bucket stores nothing any more, so that their members seem to be alive.
        alive = spawn(living(self._shared))
        try:
            return await self._status(alive)
        finally:
            await end(alive)

    async def _status(self, alive: Awaitable[list[str]]) -> BufferStatus:
        log, subjects = self._buffer.config.log, self._buffer.subjects
        troubles, ends = await self._shared.troubles(), await self._log.partition_ends()
        cursors: dict[int, Cursor] | None = None
        quarantined, waiting, trouble, why = None, None, "", None
        try:
            why = await self._apart(checked=not self._log.altered.why)  # that is said for itself
            cursors, quarantined = await self._ledger.cursors(), await self._ledger.quarantined()
            waiting = await self._ledger.waiting.totals()
        except LogUnavailable:
            raise
        except BufstoreError as e:
            trouble = str(e)
        flushed = {p: cursor.seq for p, cursor in (cursors or {}).items()}
        fill, full_in_s = await FillForecast(lambda: look(self._log, self._shared, flushed)).measured()
        nats_trouble, full = await asked(lambda: is_full(self._log))
        members = sorted(await alive)
        health = health_of(
            log=nats_trouble if why is None else str(why),
            store=trouble,
            flusher=told_by_flushers(troubles),
            full=full or "",
            altered=self._log.altered,
            flushers=bool(members),
            waiting=waiting,
        )
        owner = owners(members, subjects.partitions)
        above = fill.held.above
        partitions = [_partition(p, end, cursors, above[p], owner.get(p)) for p, end in enumerate(ends)]
        sizes = await self._log.last_groups()
        return BufferStatus(
            ok=health.ok,
            postgres_trouble=trouble,
            stream=log.stream,
            lane=log.lane,
            lanes=log.lanes,
            log_bytes=fill.held.bytes,
            log_bytes_max=fill.held.limit,
            log_bytes_unflushed=fill.unflushed,
            log_full_in_s=full_in_s,
            log_trouble=health.log,
            can_write=health.can_write,
            write_trouble=health.write_trouble,
            can_read=health.can_read,
            read_trouble=health.read_trouble,
            flushing=health.flushing,
            flush_trouble=health.flush_trouble,
            lag=sum(p.lag or 0 for p in partitions) if cursors is not None else None,
            waiting=waiting,
            group_entries=round(sizes.entries / sizes.groups, 1) if sizes.groups else None,
            group_bytes=round(sizes.bytes / sizes.groups, 1) if sizes.groups else None,
            quarantined=quarantined,
            members=members,
            partitions=partitions,
        )


def _partition(number: int, end: int, cursors: dict[int, Cursor] | None, above: int, owner: str | None) -> Partition:
    if cursors is None:
        at, term, lag = None, None, None
    else:
        cursor = cursors.get(number)
        at, term = (cursor.seq, cursor.term) if cursor is not None else (0, 0)
        lag = above
    return Partition(partition=number, end=end, cursor=at, term=term, lag=lag, owner=owner)


@asynccontextmanager
async def inspecting(target: Endpoints, *, applies: bool = False) -> AsyncIterator[Inspection]:
    """Look at the buffer of `target`.

    `applies`: the caller is going to write into the store. Raises NoLog; ConfigError when there is no ledger;
    ConfigDrift when log and ledger do not belong together, or the log is flushed into a store that does not come with
    bufstore; LogRolledBack when the log is gone; LogUnavailable, and with `applies` StoreUnavailable.
    """
    found = await target.find_log()
    if found is None:
        await target.check_not_lost()
        raise NoLog(target.stream)
    if applies:
        target.check_ours(found)
    config, named = found
    # While Postgres is away, the log's side can still be shown.
    patient = contextlib.suppress(*(() if applies else (StoreUnavailable, StoreMisconfigured)))
    buffer = target.buffer_of(named, BufferConfig.fitting(config, flusher=False), timeout_s=_TIMEOUT_S)
    async with buffer.connected():
        await buffer.log.epoch(checked=False)
        with patient:
            if not await (target.has_ledger(config) if applies else buffer.ledger.look()):
                raise ConfigError(f"schema {target.schema!r} of this database has no buffer tables")
            check_same(target.stream, buffer.log.target, await buffer.ledger.target())
        yield Inspection(buffer)
