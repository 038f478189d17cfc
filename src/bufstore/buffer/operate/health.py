"""The health and the statistics of a buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bufstore.buffer.append.appender import Appender
from bufstore.buffer.flush.flusher import Flusher
from bufstore.buffer.flush.flusher_state import FlusherState, of_all, state_of_all, told_by_flushers
from bufstore.buffer.operate.log_fill import FillForecast
from bufstore.buffer.parts import AnyParts
from bufstore.buffer.ports.log import UNALTERED, Altered, Log
from bufstore.buffer.ports.shared_state import Session
from bufstore.buffer.ports.waiting import WaitingTotals
from bufstore.buffer.read.reads import Reads
from bufstore.errors import BufstoreError
from bufstore.jetstream.messages import AppendUnknown

_TIMEOUT_S = 2.0
_SILENT = f"no answer in {_TIMEOUT_S:g} s"
#: With less than this fraction of the log free, it counts as full before it refuses a write.
_FREE_MIN = 0.01


@dataclass(frozen=True)
class Statistics:
    """Counters of this process since its start, and the present state of the buffer."""

    appended: int
    conflicts: int
    #: How many groups of entries this process wrote, and how often it sent one again because another process was first.
    groups: int
    refused: int
    flusher: FlusherState
    log_bytes: int
    log_bytes_max: int
    #: About how many of the log's bytes are not flushed.
    log_bytes_unflushed: int
    #: The shortest time, in seconds, until the log is full if its unflushed part keeps growing as it did since an
    #: earlier call (at most two minutes ago); None when that part does not grow, and in the first call.
    log_full_in_s: float | None
    #: Messages sent to and received from NATS.
    nats_sent: int
    nats_received: int


def statistics_of_all(lanes: Sequence[Statistics]) -> Statistics:
    """Combine the statistics of several lanes: sums, and the time until the first lane's log is full."""
    if len(lanes) == 1:
        return lanes[0]
    full_in_s = [s.log_full_in_s for s in lanes if s.log_full_in_s is not None]
    added = {f.name: sum(getattr(s, f.name) for s in lanes) for f in fields(Statistics) if f.type == "int"}
    return Statistics(
        **added,
        flusher=state_of_all([s.flusher for s in lanes]),
        log_full_in_s=min(full_in_s, default=None),
    )


@dataclass(frozen=True)
class Health:
    """What this process can do, and what is wrong; an empty string means that nothing is.

    A readiness probe asks `can_write`, and also `can_read` if the app cannot serve unless it can read everything. A
    liveness probe asks none of these: such trouble passes by itself or needs an operator, and no restart cures it.
    """

    #: What is wrong with each part: NATS, Postgres, this process's flusher (if it has none: the others').
    log: str
    store: str
    flusher: str
    #: Why no checkpoint is accepted; why some reads fail; why nothing is flushed, or not everything.
    write_trouble: str
    read_trouble: str
    flush_trouble: str

    @property
    def can_write(self) -> bool:
        """Whether the log accepts checkpoints; Postgres may be away."""
        return not self.write_trouble

    @property
    def can_read(self) -> bool:
        """Whether every thread can be read, at every level. If not, `read_trouble` says what can still be read."""
        return not self.read_trouble

    @property
    def flushing(self) -> bool:
        """Whether acknowledged entries get into Postgres, flushed by this process or by others."""
        return not self.flush_trouble

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not any(getattr(self, field.name) for field in fields(self))


def health_of(
    *,
    log: str,
    store: str,
    flusher: str,
    full: str = "",
    behind: str = "",
    unregistered: str = "",
    altered: Altered = UNALTERED,
    flushers: bool = True,
    waiting: WaitingTotals | None = None,
) -> Health:
    """Derive the health from what is wrong with the parts.

    `full`: why the log takes no writes. `behind`: why Postgres answers no reads, or its answers do not count.
    `unregistered`: why new runs are not registered, which stops no write. `altered`: what somebody has changed of the
    log's settings. `flushers`: whether any flusher is alive.
    `waiting`: the ledger's waiting entries; None: unknown.
    """
    read = ""
    if log:
        read = f"NATS: {log}; flushed content can still be read with Consistency.EVENTUAL"
    elif altered.stops_reads:
        read = f"NATS: {altered.why}; flushed content can still be read with Consistency.EVENTUAL"
    elif store:
        read = unread(store)
    elif behind:
        read = behind
    flush = flusher
    if log or store:
        flush = f"NATS: {log}" if log else f"Postgres: {store}"
    elif not flushers:
        flush = "no flusher is alive: what is acknowledged waits in the log"
    elif waiting is not None and waiting.entries:
        flush = "; ".join(filter(None, [flusher, f"entries wait: {waiting}"]))
    return Health(
        log=log or altered.why or (unregistered and f"new runs are not registered: {unregistered}"),
        store=store,
        flusher=flusher,
        write_trouble=f"NATS: {log}" if log else altered.why if altered.stops_writes else full,
        read_trouble=read,
        flush_trouble=flush,
    )


def unread(store: str) -> str:
    """Return which reads fail when this is wrong with the store; empty if nothing is."""
    return f"Postgres: {store}; threads whose last snapshot is in the log can be read" if store else ""


def health_of_all(lanes: Sequence[Health]) -> Health:
    """Combine the health of several lanes: each text names all lanes that have trouble, by number."""
    if len(lanes) == 1:
        return lanes[0]
    return Health(**{f.name: of_all([getattr(h, f.name) for h in lanes]) for f in fields(Health)})


class Vitals:
    """Asks the parts of one buffer how they are."""

    def __init__(
        self,
        parts: AnyParts,
        session: Session,
        fill: FillForecast,
        appender: Appender[Any, Any],
        flusher: Flusher | None,
        reads: Reads[Any],
    ) -> None:
        self._session = session
        self._ledger, self._subjects = parts.ledger, parts.subjects
        self._fill = fill
        self._appender = appender
        self._flusher = flusher
        self._reads = reads

    async def statistics(self) -> Statistics:
        """Return the counters, the log's fill, and how long the log has space. Raises LogUnavailable."""
        fill, full_in_s = await self._fill.now()
        sent, received = self._session.traffic
        return Statistics(
            appended=self._appender.appended,
            conflicts=self._appender.conflicts,
            groups=self._session.log.writes.groups,
            refused=self._session.log.writes.refused,
            flusher=self._flusher.state if self._flusher is not None else FlusherState(),
            log_bytes=fill.held.bytes,
            log_bytes_max=fill.held.limit,
            log_bytes_unflushed=fill.unflushed,
            log_full_in_s=full_in_s,
            nats_sent=sent,
            nats_received=received,
        )

    async def health(self) -> Health:
        """Return what this process can do at this moment, and what is wrong.

        Asks NATS (on a replicated log, the leader must prove that it leads) and Postgres, for two seconds at most.
        """
        restored, shared = self._reads.restored, self._session.shared
        (log, full), (store, waiting), (behind, _), (down, _), (unasked, members), (_, troubles) = await asyncio.gather(
            asked(lambda: is_full(self._session.log)),
            asked(self._waiting),
            asked(lambda: restored.counts_since(restored.era)),
            asked(self._reads.store.answers),
            asked(shared.members),
            asked(shared.troubles),
        )
        if self._session.log.refused is not None:
            log = str(self._session.log.refused)
        if self._flusher is not None:
            flusher = self._flusher.trouble
        else:
            flusher = (
                f"it is not known whether others flush: {unasked}" if unasked else told_by_flushers(troubles or {})
            )
        return health_of(
            log=log,
            # A store that cannot be reached says why before the time is over.
            store=down or store if store == _SILENT else store,
            flusher=flusher,
            full=full or self._appender.refused or shared.refused or self._session.log.trouble,
            behind=behind or self._reads.refused or unread(down),
            unregistered=shared.unregistered,
            altered=self._session.log.altered,
            flushers=self._flusher is not None or bool(members) or bool(unasked),
            waiting=waiting,
        )

    async def _waiting(self) -> WaitingTotals:
        """Return how much waits, once Postgres has answered the query for the cursors, as a flusher sends it."""
        await self._ledger.cursors()
        return await self._ledger.waiting.totals()

    async def lag(self) -> dict[int, int]:
        """Return for each partition how far, in log positions, its cursor is behind its last entry.

        Raises Unavailable errors.
        """
        cursors = await self._ledger.cursors()
        held = await self._session.log.held({p: cursor.seq for p, cursor in cursors.items()})
        return {p: held.above[p] for p in range(self._subjects.partitions)}


async def is_full(log: Log) -> str:
    """Return why the log accepts no entries; empty if it does. Raises LogUnavailable, AppendUnknown."""
    # A leader that the other nodes have left would answer as if all were well. The caller gives up sooner than this, so
    # it gives up the question and not the connection.
    await log.prove_leader(2 * _TIMEOUT_S)
    used, limit = await log.fill()
    return "" if used <= (1 - _FREE_MIN) * limit else f"the log is full: {used} of {limit} bytes"


async def asked(question: Callable[[], Awaitable[Any]]) -> tuple[str, Any]:
    """Return what is wrong with the part that is asked, and its answer; after two seconds at most."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return "", await question()
    except TimeoutError:
        return _SILENT, None
    except (BufstoreError, AppendUnknown) as e:
        return str(e) or type(e).__name__, None
