"""AsyncBufferedSaver: LangGraph's checkpoints through the log, into the tables of its own saver for Postgres."""

from __future__ import annotations

import asyncio
import functools
import queue
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Self, TypedDict, TypeVar, Unpack

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from bufstore.buffer.operate.health import Health, Statistics, health_of_all, statistics_of_all
from bufstore.config import BufferConfig
from bufstore.errors import ConfigError, ReadNotFresh, StoreMisconfigured, StoreUnavailable
from bufstore.home import FORKED, Home
from bufstore.langgraph.engine import DEFAULT_LOG, CheckpointEngine
from bufstore.langgraph.history import History
from bufstore.langgraph.lane import NewThreads, OnConflict
from bufstore.langgraph.postgres.store import BUFFER_SCHEMA, PostgresCheckpointStore
from bufstore.langgraph.protocol import CheckpointStore, Query
from bufstore.langgraph.serialize import (
    Making,
    config_of,
    history_of,
    id_in,
    id_of,
    json_of,
    place,
    thread_of,
    tuple_of,
    writes_of,
)
from bufstore.loop_thread import Call
from bufstore.nats.session import Nats
from bufstore.types import Consistency, check_ids

P = ParamSpec("P")
T = TypeVar("T")

#: How long, in seconds, a blocking call waits for the saver's loop to start.
_START_S = 1.0
#: Beyond a clock's range, `datetime` raises OverflowError.
_LONG = timedelta(days=365_000)
_NO_LOOP = "the saver's event loop does not run: keep it running, or use BufferedSaver"
_LOOP_ENDED = (
    "the saver's event loop stopped during the call, so a write may or may not be stored; keep the loop running, or "
    "use BufferedSaver"
)


def _blocking(
    method: Callable[Concatenate[AsyncBufferedSaver, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[AsyncBufferedSaver, P], T]:
    """Return the method as a blocking one, for every thread but that of the saver's event loop."""
    name = method.__name__

    @functools.wraps(method, assigned=("__doc__",))
    def call(self: AsyncBufferedSaver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._wait(lambda: getattr(self, name)(*args, **kwargs))
        return result

    call.__name__ = name.removeprefix("a")
    return call


class SaverOptions(TypedDict, total=False):
    """The options of `AsyncBufferedSaver.open`, as the other ways to open a saver pass them on."""

    config: BufferConfig | None
    serde: SerializerProtocol | None
    consistency: Consistency
    new_threads: NewThreads
    on_conflict: OnConflict
    cache_bytes: int


class AsyncBufferedSaver(BaseCheckpointSaver[str]):
    """LangGraph's checkpoints, acknowledged by the log and moved into Postgres many at a time.

    Use it in place of ``AsyncPostgresSaver``, on the same tables. Make one with `from_conn_string`, or make it with
    `open` and close it with `aclose`. The blocking methods may be called from any thread but that of its event loop.
    """

    def __init__(self, engine: CheckpointEngine, *, serde: SerializerProtocol | None = None) -> None:
        super().__init__(serde=serde)
        #: The engine, which works with log and store. The clones that `with_allowlist` makes share it.
        self.engine = engine
        self._loop, self._home = asyncio.get_running_loop(), Home()

    @classmethod
    async def open(
        cls,
        store: CheckpointStore,
        *,
        nats: Nats = "nats://127.0.0.1:4222",
        config: BufferConfig | None = None,
        serde: SerializerProtocol | None = None,
        consistency: Consistency = Consistency.READ_YOUR_WRITES,
        new_threads: NewThreads = "ask",
        on_conflict: OnConflict = "allow",
        cache_bytes: int = 64 << 20,
    ) -> Self:
        """Connect, create what is missing, check what is there, and begin to flush.

        `store`: a PostgresCheckpointStore or MemoryCheckpointStore, opened and closed with the saver. `nats`: where the
        log is; a `bufstore.memory.MemoryNats` for tests without a server. `config` names the log (by default stream
        LANGGRAPH), or the first of several (docs/OPERATIONS.md, Lanes). `cache_bytes`: how much of what was read and
        written is remembered, to read on without Postgres.
        `new_threads`: what to do about a thread that the log does not show while Postgres is away: "ask" raises
        StoreUnavailable, "assume" takes it for a new one. `on_conflict`: "allow" lets two workers write to a thread at
        once, as LangGraph's own saver does; "reject" raises ConcurrentWriter in the worker that comes second.

        Raises what `bufstore.BufferedThreadStore.open` raises.
        """
        config = config or BufferConfig(log=DEFAULT_LOG)
        if config.log.archive:
            raise ConfigError("LogConfig.archive is for threads of messages: nothing can archive a saver's log")
        engine = CheckpointEngine(
            store,
            nats,
            config,
            consistency=consistency,
            new_threads=new_threads,
            on_conflict=on_conflict,
            cache_bytes=cache_bytes,
        )
        await engine.open()
        return cls(engine, serde=serde)

    @classmethod
    @asynccontextmanager
    async def from_conn_string(
        cls,
        conn_string: str,
        nats: Nats = "nats://127.0.0.1:4222",
        *,
        schema: str | None = None,
        buffer_schema: str = BUFFER_SCHEMA,
        history: History = "all",
        pool_size: int = 16,
        **options: Unpack[SaverOptions],
    ) -> AsyncIterator[Self]:
        """Open a saver on LangGraph's tables for the block, whose end flushes what is acknowledged.

        `conn_string`: Postgres, as a URL or key=value. `schema`: where the tables are; None: in `public`, unless
        LangGraph's own saver uses others on this connection. `buffer_schema`: where the buffer keeps its own tables.
        `history`: how much of a thread's history is written (docs/LANGGRAPH.md, Growth). For the options and the errors
        see `open`.
        """
        store = PostgresCheckpointStore(
            conn_string, schema=schema, buffer_schema=buffer_schema, history=history, pool_size=pool_size
        )
        saver = await cls.open(store, nats=nats, **options)
        try:
            yield saver
        finally:
            await saver.aclose()

    async def setup(self) -> None:
        """Do nothing: `open` has made sure that the tables are there. LangGraph's own saver needs this call."""

    async def aclose(self) -> None:
        """Finish the writes on their way, flush what this process still can, stop, and release everything."""
        await self.engine.aclose()

    async def force_flush(self, thread_id: str | None = None, *, timeout_s: float | None = None) -> None:
        """Return once everything (of the thread) that is acknowledged now is in Postgres. Raises FlushTimeout."""
        await self.engine.flush(thread_of(thread_id) if thread_id is not None else None, timeout_s=timeout_s)

    async def health(self) -> Health:
        """Report what this process can do at this moment, and what is wrong: see `BufferedThreadStore.health`."""
        return health_of_all(await self.engine.lanes.each(lambda buffer: buffer.vitals.health()))

    async def statistics(self) -> Statistics:
        """Return counters, how full the log is, and how long it has space; for all lanes together.

        Raises LogUnavailable.
        """
        return statistics_of_all(await self.engine.lanes.each(lambda buffer: buffer.vitals.statistics()))

    # --- one checkpoint ---------------------------------------------------------------------------------------

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Save a checkpoint, and the values of the channels in `new_versions`. Returns once the log has it.

        Raises InvalidRecord and InvalidId for what Postgres could not hold, and what `CheckpointLane.append` raises.
        """
        thread_id, ns, parent = at = place(config)
        lane = self.engine.of(thread_id)
        if lane.backlog.full:
            await lane.backlog.room()
        id_ = checkpoint["id"]
        make = Making(self.serde, lane.rows_read, at, config, checkpoint, metadata, new_versions)
        await lane.put(thread_id, ns, parent, id_, new_versions, make)
        return config_of(thread_id, ns, id_)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save what a task has written on top of a checkpoint, which need not be there yet. Raises like `aput`."""
        if not writes:
            return
        thread_id, _, _ = at = place(config)
        lane = self.engine.of(thread_id)
        if lane.backlog.full:
            await lane.backlog.room()
        await lane.append(thread_id, writes_of(self.serde, at, writes, task_id, task_path))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint that the config names, or the newest one of its namespace; None if there is none.

        It shows everything that was acknowledged before the call. Raises ReadNotFresh, ThreadQuarantined, and
        StoreUnavailable when only Postgres could tell.
        """
        thread_id, ns, checkpoint_id = place(config)
        # A subgraph's namespace begins after the checkpoint that it was called from.
        above = ns.rpartition("|")[0]
        caller = (config["configurable"].get("checkpoint_map") or {}).get(above) if ":" in ns else None
        since = (above, caller) if caller else None
        found = await self.engine.of(thread_id).checkpoint(thread_id, ns, checkpoint_id, since=since)
        if found is None:
            return None
        tables, row = found
        return tuple_of(self.serde, self.get_next_version, thread_id, tables, row)

    # --- many checkpoints -------------------------------------------------------------------------------------

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Flush what is acknowledged now, then yield checkpoints, newest first. They are read a page at a time.

        Raises FlushTimeout, StoreUnavailable, LogUnavailable, and ThreadQuarantined when the config names a thread: a
        list of all threads shows what was flushed of one in quarantine.
        """
        thread_id, _, checkpoint_id = place(config) if config else (None, None, None)
        query = Query(
            thread_id=thread_id,
            ns=config["configurable"].get("checkpoint_ns") if config else None,
            checkpoint_id=checkpoint_id,
            metadata=json_of(filter, "the filter") if filter else None,
            before=id_in(before) if before is not None else None,
        )
        async for found_in, tables in self.engine.pages(query, int(limit) if limit is not None else None):
            (row,) = tables.checkpoints.values()
            yield tuple_of(self.serde, self.get_next_version, found_in, tables, row)

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete all of a thread's checkpoints and writes. Raises like `aput`."""
        thread_id = thread_of(thread_id)
        await self.engine.of(thread_id).delete(thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints that these runs have saved, in any thread, and their writes.

        Raises like `aprune`. If some of them are in quarantine, raises ThreadQuarantined once all others are deleted,
        because a replay would bring those back: replay or discard them, and repeat the call.
        """
        await self.engine.delete_for_runs([id_of(run_id, "run_id") for run_id in check_ids(run_ids, "run_ids")])

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all of a thread's checkpoints and their writes. Raises like `alist` and `aput`."""
        await self.engine.copy(thread_of(source_thread_id), thread_of(target_thread_id))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete the threads ("delete"), or all but the newest checkpoint of each namespace ("keep_latest").

        Raises NotImplementedError, before anything is deleted, for "keep_latest" on a thread with a DeltaChannel, which
        needs its earlier checkpoints; ConcurrentWriter for a thread to which others keep writing; and like
        `alist` and `aput`.
        """
        if strategy not in ("keep_latest", "delete"):
            raise ValueError(f"unknown strategy {strategy!r}")
        threads = [thread_of(thread_id) for thread_id in check_ids(thread_ids, "thread_ids")]
        if strategy == "delete":
            await self.engine.delete(threads)
            return
        delta = [t for t in threads if any(o.delta for o in await self.engine.of(t).outlines(t))]
        if delta:
            raise NotImplementedError(f"threads with a DeltaChannel cannot be pruned: {', '.join(delta)}")
        await self.engine.prune(threads)

    async def aprune_idle(self, idle_for: timedelta, *, strategy: str = "keep_latest") -> list[str]:
        """Prune, as `aprune` does, the threads whose last checkpoint is older than `idle_for`. Returns those pruned.

        A checkpoint's time is that of the process that made it; the present time is that of this machine or of
        Postgres, whichever is earlier.

        A job for quiet hours: it reads the whole table. "delete" leaves a thread alone that is written to meanwhile.
        Threads in quarantine are left alone, and with "keep_latest" those with a DeltaChannel. Raises like `aprune`,
        and ValueError for an impossible `idle_for`.
        """
        if strategy not in ("keep_latest", "delete"):
            raise ValueError(f"unknown strategy {strategy!r}")
        if not isinstance(idle_for, timedelta) or not -_LONG < idle_for < _LONG:
            raise ValueError(f"idle_for must be a timedelta of less than a thousand years, not {idle_for!r}")
        return await self.engine.prune_idle(idle_for, delete=strategy == "delete")

    async def aerase_thread(self, thread_id: str) -> None:
        """Delete the thread, and remove its content from the log and from quarantine for good.

        After `adelete_thread` alone the content stays in the log until it is purged. Returns after the log's
        ``failover_window_s`` at the earliest, because until then Postgres may need the entries again. Safe to repeat.
        Raises FlushTimeout, StoreUnavailable, and like `aput`.
        """
        thread_id = thread_of(thread_id)
        await self.engine.of(thread_id).erase(thread_id)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return what the ancestors of a checkpoint have written to these channels, back to where a value is stored.

        It reads many ancestors at a time; while Postgres is away, one at a time, and only those that are remembered.
        Raises like `aget_tuple`.
        """
        target = await self.aget_tuple(config) if channels else None
        if target is None:
            return {channel: {"writes": []} for channel in channels}
        thread_id, ns, _ = place(target.config)
        try:
            walk = await self.engine.of(thread_id).ancestors(
                thread_id, ns, id_in(target.parent_config) if target.parent_config else None, channels
            )
        except (StoreUnavailable, StoreMisconfigured, ReadNotFresh):
            return await super().aget_delta_channel_history(config=target.config, channels=channels)
        return {channel: history_of(self.serde, walk, channel) for channel in channels}

    # --- the same, blocking -----------------------------------------------------------------------------------

    put = _blocking(aput)
    put_writes = _blocking(aput_writes)
    get_tuple = _blocking(aget_tuple)
    delete_thread = _blocking(adelete_thread)
    delete_for_runs = _blocking(adelete_for_runs)
    copy_thread = _blocking(acopy_thread)
    prune = _blocking(aprune)
    get_delta_channel_history = _blocking(aget_delta_channel_history)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """See `alist`."""
        found = self.alist(config, filter=filter, before=before, limit=limit)
        while (item := self._wait(lambda: anext(found, None))) is not None:
            yield item

    def _wait(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            raise ConfigError("a blocking call on the saver's own event loop would deadlock: use the async method")
        if self._home.left:
            raise ConfigError(FORKED)
        if not self._runs():
            raise ConfigError(_NO_LOOP)
        call = Call(self._loop, work)
        try:
            call.begin()
            return call.result(self._runs)
        except asyncio.CancelledError:
            # The loop ended. LangGraph would take a bare CancelledError for the end of a run in which all is well.
            raise ConfigError(_LOOP_ENDED) from None
        finally:
            call.cancel()

    def _runs(self) -> bool:
        """Whether the saver's loop runs, or starts within a moment."""
        if not self._loop.is_running():
            runs: queue.SimpleQueue[None] = queue.SimpleQueue()  # a signal handler may end the wait: see `Call`
            with suppress(RuntimeError, queue.Empty):  # the loop is closed; it does not start
                self._loop.call_soon_threadsafe(runs.put, None)
                runs.get(timeout=_START_S)
        return self._loop.is_running()

    def get_next_version(self, current: str | None, channel: None) -> str:
        """Return a version after `current`, in the form that LangGraph's saver for Postgres gives it."""
        number = current if isinstance(current, int) else int(current.partition(".")[0]) if current is not None else 0
        return f"{number + 1:032}.{random.random():016}"  # noqa: S311
