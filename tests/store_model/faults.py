"""Log, hot state, ledger and store in memory, with faults in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.ports.ledger import FlushFailed
from bufstore.buffer.ports.shared_state import Session
from bufstore.buffer.target import Target
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import AlreadyExists, LogFull, LogUnavailable, StoreUnavailable
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, StoredMessage
from bufstore.memory.ledger import MemoryLedger
from bufstore.memory.log import MemoryLog, MemoryStream
from bufstore.memory.server import MemoryNats, MemorySession
from bufstore.memory.shared_state import MemoryBucket, MemorySharedState
from bufstore.threads.memory_store import MemoryThreadStore
from bufstore.threads.model import ThreadChange
from store_model.archiving import ArchivingStream
from store_model.story import BAD_RUN

#: Possible faults of one write to the log.
LOG_FAULTS = ("stored", "lost", "late", "doubled", "unavailable", "full", "slow")
#: Possible faults of one call of Postgres.
STORE_FAULTS = ("before", "after")


@dataclass
class Weather:
    """The present faults, for all instances; all randomness comes from one seed."""

    chance: random.Random
    #: The faults of the next writes to the log, and of the next calls of Postgres.
    log: deque[str] = field(default_factory=deque)
    store: deque[str] = field(default_factory=deque)
    #: Until when NATS is away, and Postgres.
    log_away_until: float = 0.0
    store_away_until: float = 0.0
    #: Until when errors are expected.
    rough_until: float = 0.0
    #: When the last late message arrives.
    late_until: float = 0.0
    #: When Postgres last failed.
    store_failed_at: float = -1.0
    seen: Counter[str] = field(default_factory=Counter)
    #: All entries that the log ever took.
    archive: list[StoredMessage] = field(default_factory=list)

    def rough(self, seconds: float) -> None:
        """Note that something fails now; errors are expected for so long."""
        now = asyncio.get_running_loop().time()
        self.rough_until = max(self.rough_until, now + seconds)

    def calm(self) -> None:
        """End all faults; late messages still arrive."""
        self.log.clear()
        self.store.clear()
        self.log_away_until = self.store_away_until = 0.0

    async def delay(self) -> None:
        """Wait as long as a random call takes."""
        if self.chance.random() < 0.3:
            await asyncio.sleep(self.chance.choice((0.001, 0.01, 0.1)))
        else:
            await asyncio.sleep(0)

    async def at_nats(self) -> None:
        """Delay a call of NATS; raise LogUnavailable while NATS is away."""
        await self.delay()
        if asyncio.get_running_loop().time() < self.log_away_until:
            await asyncio.sleep(self.chance.choice((0, 0.5)))
            raise LogUnavailable("NATS is away")


class FaultyLog(MemoryLog):
    """One instance's log."""

    def __init__(
        self, weather: Weather, streams: dict[str, MemoryStream], config: BufferConfig, message_bytes_max: int
    ) -> None:
        super().__init__(streams, config, message_bytes_max)
        self._weather = weather

    async def create(self, epoch: int, target: Target) -> None:
        name = self._config.log.stream
        self._streams.setdefault(name, ArchivingStream(self._config.log, self._weather.archive, epoch, target))

    async def _turn(self) -> MemoryStream:
        await self._weather.at_nats()
        stream = await super()._turn()
        await asyncio.sleep(0)
        return stream

    async def _write(self, messages: Sequence[Outgoing]) -> int:
        fault = self._weather.log.popleft() if self._weather.log else ""
        stream = await self._turn()
        if fault:
            self._weather.seen[f"log {fault}"] += 1
            self._weather.rough(15)
        match fault:
            case "unavailable":
                raise LogUnavailable("no leader")
            case "full":
                raise LogFull("maximum bytes exceeded")
            case "lost":
                raise AppendUnknown("no answer")
            case "stored":
                with contextlib.suppress(Conflict):
                    stream.store(messages)
                raise AppendUnknown("no answer")
            case "late" | "very late" | "held up":
                self._be_late(stream, messages, (0.05, 0.5, 3, 12, 45) if fault == "late" else (60,))
                if fault == "held up":  # nothing else gets through before the caller has given up
                    now = asyncio.get_running_loop().time()
                    self._weather.log_away_until = now + self._config.append_timeout_s + 0.5
                raise AppendUnknown("no answer")
            case "doubled":
                self._be_late(stream, messages, (0, 0.01, 0.5, 12, 45))
            case "slow":
                await asyncio.sleep(2)
        seq = stream.store(messages)
        await self._weather.delay()
        return seq

    def _be_late(self, stream: MemoryStream, messages: Sequence[Outgoing], delays: Sequence[float]) -> None:
        loop = asyncio.get_running_loop()
        after = self._weather.chance.choice(delays)
        self._weather.late_until = max(self._weather.late_until, loop.time() + after)

        def arrive() -> None:
            with contextlib.suppress(Conflict, LogFull):
                stream.store(messages)
                self._weather.seen["log landed late"] += 1

        loop.call_later(after, arrive)


class FaultyHot(MemorySharedState):
    """One instance's hot state."""

    def __init__(self, weather: Weather, bucket: MemoryBucket) -> None:
        super().__init__(bucket)
        self._weather = weather

    async def _turn(self) -> MemoryBucket:
        await self._weather.at_nats()
        return await super()._turn()


class FaultyNats(MemoryNats):
    """A server with faulty connections, whose log is archived."""

    def __init__(self, weather: Weather, logs: Sequence[LogConfig]) -> None:
        super().__init__()
        self._weather = weather
        for config in logs:
            self.streams[config.stream] = ArchivingStream(config, weather.archive)
            self.buckets[config.bucket] = MemoryBucket()

    def session(self, config: BufferConfig) -> Session:
        log = FaultyLog(self._weather, self.streams, config, message_bytes_max=4096)
        return MemorySession(log, FaultyHot(self._weather, self.buckets[config.log.bucket]), config)


class Postgres:
    """A store that refuses bad runs, and a ledger for each lane; all of it can be copied, and put back."""

    def __init__(self, weather: Weather, lanes: int) -> None:
        self.weather = weather
        self.store = RefusingStore()
        self.ledgers = [BuryingLedger(self.store) for _ in range(lanes)]
        #: The thread whose bad runs are accepted at the moment.
        self.mended: str | None = None
        self.store.database = self
        self.store._ledgers.update(enumerate(self.ledgers))
        #: How many failovers there were; each breaks the connections.
        self.falls = 0

    async def gated(self, call: Callable[..., Awaitable[Any]], *arguments: Any, **options: Any) -> Any:
        """Make a call as an instance does: with delays and faults."""
        weather = self.weather
        await weather.delay()
        if asyncio.get_running_loop().time() < weather.store_away_until:
            await asyncio.sleep(weather.chance.choice((0, 0.1, 1)))
            raise self._error()
        fault = weather.store.popleft() if weather.store else ""
        if fault:
            weather.seen[f"store {fault}"] += 1
            weather.rough(15)
        if fault == "before":
            raise self._error()
        answer = await call(*arguments, **options)
        await weather.delay()
        if fault == "after":
            raise self._error()
        return answer

    def _error(self) -> Exception:
        self.weather.store_failed_at = asyncio.get_running_loop().time()
        return StoreUnavailable("Postgres is away")

    def copy(self) -> list[dict[Any, Any]]:
        """Copy the content, to be put back."""
        return [dict(table) for table in self._tables()]

    def put_back(self, copy: list[dict[Any, Any]]) -> None:
        """Fail over to an earlier copy."""
        self.falls += 1
        for table, content in zip(self._tables(), copy, strict=True):
            table.clear()
            table.update(content)

    def _tables(self) -> list[dict[Any, Any]]:
        s = self.store
        tables: list[dict[Any, Any]] = [s._threads, s._messages, s._runs, s._states, s._changed, s._created]
        for ledger in self.ledgers:
            parked, waiting = ledger.parked, ledger.waiting
            tables += [ledger._rows, ledger._cursors, parked.entries, parked.given_up, waiting.entries]
        return tables


class BuryingLedger(MemoryLedger):
    """A ledger that reports the rows that it buries."""

    def __init__(self, store: MemoryThreadStore) -> None:
        super().__init__(store)
        self.on_burial: Callable[[str, int], None] = lambda thread_id, seq: None

    async def bury(self, tombstones: Sequence[tuple[int, str]]) -> None:
        before = dict(self._rows)
        await super().bury(tombstones)
        for thread_id in before.keys() - self._rows.keys():
            self.on_burial(thread_id, before[thread_id].flushed_seq)


class RefusingStore(MemoryThreadStore):
    """A store that refuses a whole batch if it has a bad run."""

    database: Postgres

    async def apply(self, connection: object, batch: Sequence[ThreadChange]) -> None:
        of_others = [c for c in batch if c.thread_id != self.database.mended]
        if any(run_id.startswith(BAD_RUN) for c in of_others for run_id in c.runs):
            raise AlreadyExists("a constraint of the app's")
        await super().apply(connection, batch)


class StoreView(MemoryThreadStore):
    """The store as an instance sees it: the same rows, with faults."""

    def __init__(self, database: Postgres) -> None:
        self.__dict__ = database.store.__dict__


def _behind_weather(name: str) -> Any:
    async def read(self: StoreView, *arguments: Any, **options: Any) -> Any:
        direct = getattr(super(StoreView, self), name)
        return await self.__dict__["database"].gated(direct, *arguments, **options)

    return read


for _name in ("load_checkpoint", "load_run", "query_messages", "query_runs", "query_threads", "load_message", "_held"):
    setattr(StoreView, _name, _behind_weather(_name))


class LedgerView:
    """A ledger, or a part of one, as an instance sees it."""

    def __init__(self, database: Postgres, of: Any) -> None:
        self._database = database
        self._of = of

    @property
    def parked(self) -> Any:
        return LedgerView(self._database, self._of.parked)

    @property
    def waiting(self) -> Any:
        return LedgerView(self._database, self._of.waiting)

    @property
    def connections(self) -> int:
        return self._database.falls

    @property
    def changes_of_database(self) -> int:
        return self._database.falls

    async def open(self) -> None:
        """Do nothing: the database need not be up."""

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""

    async def flush(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await self._database.gated(self._of.flush, *arguments, **options)
        except StoreUnavailable as e:
            if self._database.weather.chance.random() < 0.5:
                raise
            raise FlushFailed(str(e), Verdict.RETRY) from e

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._of, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            return await self._database.gated(method, *arguments, **options)

        return call
