"""BufferedThreadStore: a ThreadRunStore whose writes go through the log.

Writes append to the log and return when that is durable; the flusher moves them into the wrapped store. Reads join
what the store holds with the thread's tail in the log. This is the typed face of a `bufstore.buffer.buffer.Buffer`: the
write path is `bufstore.threads.write` → `bufstore.buffer.append.appender`, the flush path
`bufstore.buffer.flush.flusher`, the read path `bufstore.buffer.read.reads`.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from bufstore.buffer import producers
from bufstore.buffer.append.tip import Prepare
from bufstore.buffer.operate.audit import Verification, verification_of_all
from bufstore.buffer.operate.health import Health, Statistics, health_of_all, statistics_of_all
from bufstore.buffer.operate.quarantine import Quarantine
from bufstore.config import BufferConfig
from bufstore.errors import ConfigError, InvalidQuery, StoreUnavailable
from bufstore.nats.session import Nats
from bufstore.threads.behind import lanes_of
from bufstore.threads.buffered_edits import BufferedEdits
from bufstore.threads.buffered_lineage import BufferedLineage
from bufstore.threads.bulk import BulkWriter
from bufstore.threads.digests import MessageMemory
from bufstore.threads.edited_store import EditedStore
from bufstore.threads.edits import WantedEdit
from bufstore.threads.erasing import Erasure, ThreadEraser
from bufstore.threads.lanes import ThreadBuffer, ThreadLanes
from bufstore.threads.lineage import Children, LineageChange
from bufstore.threads.lists import BufferedLists
from bufstore.threads.model import Checkpoint, Run, Thread, decode_message, decode_run
from bufstore.threads.payload import content_hash
from bufstore.threads.protocol import WrappableStore
from bufstore.threads.queries import (
    ALL_MESSAGES,
    ALL_RUNS,
    ALL_THREADS,
    LIMIT,
    MessagePage,
    MessageQuery,
    MessageRecord,
    RunPage,
    RunQuery,
    ThreadPage,
    ThreadQuery,
)
from bufstore.threads.runs import Runs
from bufstore.threads.state import ThreadState
from bufstore.threads.write import Acceptable, Call, call_of, judging
from bufstore.types import Consistency, Message, ProducerSequence, Quarantined, Receipt, check_choice, check_id


class BufferedThreadStore(EditedStore):
    """A `ThreadRunStore` in front of another store: make one with `open`, close it with `aclose` or ``async with``."""

    def __init__(self, store: WrappableStore, lanes: ThreadLanes, consistency: Consistency) -> None:
        self._store = store
        #: The buffers in front of the store, one for each lane; for bufstore's own tools.
        self.lanes = lanes
        self._consistency = consistency
        self._runs = Runs(store, lanes)
        self._lists = BufferedLists(store, lanes)
        self._edits = BufferedEdits(store, lanes, self._runs)
        self._lineage = BufferedLineage(lanes, self._runs, self._lists, self._edits)
        self._eraser = ThreadEraser(lanes, self._edits, self._lineage)
        #: The bulk writes of pipelines.
        self.bulk = BulkWriter(lanes, self._runs, self._lineage, self._edits)

    @property
    def buffer(self) -> ThreadBuffer:
        """The store's buffer, or that of the first lane if there are several; for bufstore's own tools."""
        return self.lanes.first

    @property
    def quarantine(self) -> Quarantine:
        """The parked entries: list, show, replay or discard them. Raises ConfigError when there are several lanes."""
        if len(self.lanes.all) > 1:
            raise ConfigError("each lane has a quarantine of its own: ask for `quarantine_of(thread_id)`")
        return self.lanes.first.quarantine

    def quarantine_of(self, thread_id: str) -> Quarantine:
        """Return the quarantine of the thread's lane, to which the thread's entries go. Raises InvalidId."""
        return self.lanes.of(check_id(thread_id, "thread_id")).quarantine

    @classmethod
    async def open(
        cls,
        store: WrappableStore,
        *,
        nats: Nats = "nats://127.0.0.1:4222",
        postgres: str | None = None,
        schema: str = "bufstore",
        consistency: Consistency = Consistency.READ_YOUR_WRITES,
        config: BufferConfig | None = None,
    ) -> Self:
        """Connect, create what is missing, check what is there, and begin to flush.

        `store`: a PostgresThreadStore or MemoryThreadStore (opened and closed with this one), or an app's own.
        `nats`: where the log is; a `bufstore.memory.MemoryNats` for tests without a server.
        `postgres`: where an app's own store keeps its tables; bufstore's are made in `schema` there, because both
        change in one transaction. `consistency` is the level of reads that name none.

        Postgres may be down, if the log exists already; then this takes 5 s. Raises ConfigError (ConfigDrift names the
        field), LogUnavailable, LogRolledBack, and StoreUnavailable when the log does not exist and Postgres is down.
        """
        config = config or BufferConfig()
        check_choice(consistency, Consistency, "consistency", ConfigError)
        name = f"bufstore-{secrets.token_hex(8)}"
        lanes = lanes_of(store, nats, config, name=name, postgres=postgres, schema=schema)
        self = cls(store, lanes, consistency)
        await lanes.open()
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r}, stream={self.lanes.config.log.stream!r})"

    async def aclose(self) -> None:
        """Finish the writes on their way, flush what this process still can, stop, and release everything.

        Bounded by ``append_timeout_s`` + ``flush_timeout_s``. What is not flushed by then stays in the log. Idempotent.
        """
        await self.lanes.aclose()

    # --- writes -----------------------------------------------------------------------------------------------

    async def checkpoint(
        self,
        thread_id: str,
        messages: Sequence[Message],
        run: Run,
        *,
        idempotency_key: str | None = None,
        producer: ProducerSequence | None = None,
    ) -> Receipt:
        """See `ThreadRunStore.checkpoint`. Also raises LogFull, LogUnavailable (nothing stored) and OutcomeUnknown.

        `producer`: for pipelines that may repeat their work. If the thread already has this number from this producer,
        the write has no effect, however much later it comes; the receipt says ``repeated``. Not together with a key.

        Needs Postgres only for a key or a producer, on a thread of which the log shows at most the first entry.
        Raises StoreUnavailable if Postgres is down then.
        """
        call = call_of(thread_id, messages, run, idempotency_key, producer)
        if not self._runs.admitted(run):
            return await self._admit_and_append(run, "whole", call, call.whole_list, idempotency_key, producer)
        return await self._append("whole", call, call.whole_list, idempotency_key, producer)

    async def checkpoint_append(
        self,
        thread_id: str,
        delta: Sequence[Message],
        run: Run,
        *,
        expected_version: int | None = None,
        idempotency_key: str | None = None,
        producer: ProducerSequence | None = None,
    ) -> Receipt:
        """See `ThreadRunStore.checkpoint_append`, and `checkpoint` for `producer`. Also raises ThreadQuarantined.

        Needs Postgres when this process has not written to the thread lately. Raises StoreUnavailable if it is down.
        """
        call = call_of(thread_id, delta, run, idempotency_key, producer, expected_version)
        if len(delta) > 1:
            call.check_new_ids()
        if not self._runs.admitted(run):
            return await self._admit_and_append(run, "append", call, call.appending, idempotency_key, producer)
        return await self._append("append", call, call.appending, idempotency_key, producer)

    async def _admit_and_append(
        self,
        run: Run,
        kind: str,
        call: Call,
        draft: Prepare[MessageMemory],
        key: str | None,
        producer: ProducerSequence | None,
    ) -> Receipt:
        """Append once the run may be saved. Raises LineageError, and what `Runs.claim` raises."""
        if await self._lineage.agreed(run):
            await self._runs.claim(run.run_id, run.thread_id)
        else:
            # The parent comes last: what repeats another, or is refused anyhow, must not set it.
            bytes_max = self.lanes.config.log.entry_bytes_max
            with suppress(Acceptable):
                return await self._append(kind, call, judging(draft, bytes_max), key, producer)
            await self._runs.check_free(run.run_id, run.thread_id)
            await self._lineage.admit(run)
        return await self._append(kind, call, draft, key, producer)

    def _append(
        self, kind: str, call: Call, draft: Prepare[MessageMemory], key: str | None, producer: ProducerSequence | None
    ) -> Awaitable[Receipt]:
        return self.lanes.of(call.thread_id).appender.append(
            call.thread_id,
            draft,
            key=key,
            content=content_hash(kind, call.encoded, call.run) if key is not None else b"",
            mark=producers.item_of(producer),
        )

    async def _edit(self, wanted: WantedEdit) -> Receipt:
        return await self._edits.edit(wanted)

    async def _change(self, wanted: LineageChange) -> Receipt:
        return await self._lineage.change(wanted)

    async def erase(self, thread_id: str, *, children: Children = Children.REJECT) -> Erasure:
        """Delete the thread if it is there, and remove its content from the log and from quarantine for good.

        Use it to meet a duty to erase: after `delete_thread` alone, the content stays in the log until it is purged.
        Returns after ``failover_window_s`` at the earliest, because until then Postgres may need the entries again.
        docs/OPERATIONS.md, "Erasure", says what is left, archives above all. Safe to repeat (after an error, with the
        same `children`), also for a thread that was deleted before.
        Raises what `delete_thread` raises, except NotFound; also FlushTimeout, StoreUnavailable.
        """
        return await self._eraser.erase(thread_id, children)

    # --- reads ------------------------------------------------------------------------------------------------

    async def load_checkpoint(
        self,
        thread_id: str,
        *,
        consistency: Consistency | None = None,
        at_least: Receipt | None = None,
        quarantined: Quarantined = "raise",
    ) -> Checkpoint | None:
        """The thread, its messages and its latest run, all as of one moment; None if there is no such thread.

        `at_least`: a receipt, maybe of another process, whose write must be visible. Raises ReadNotFresh when the
        level is not reached in ``read_timeout_s``, StoreUnavailable when only Postgres has the answer. If a parked
        entry has broken the thread's chain, raises ThreadQuarantined; with `quarantined` "known", shows the thread
        without that entry and whatever builds on it (as Consistency.EVENTUAL does).

        While Postgres is away, the log may have a thread's messages and latest run, but no more: see `partial`.
        """
        return (await self._state(thread_id, consistency, at_least, quarantined)).checkpoint()

    async def load_thread(
        self,
        thread_id: str,
        *,
        consistency: Consistency | None = None,
        at_least: Receipt | None = None,
        quarantined: Quarantined = "raise",
    ) -> Thread | None:
        """The thread without its messages. Arguments and errors as in `load_checkpoint`.

        Also raises StoreUnavailable when Postgres is away and the log has the thread's messages, but not its metadata,
        its parent or its open run.
        """
        state = await self._state(thread_id, consistency, at_least, quarantined)
        if state.partial and state.thread is not None:
            down = self.lanes.of(thread_id).reads.store.reason
            raise StoreUnavailable(f"only Postgres knows metadata and parent of thread {thread_id!r}: {down}")
        return state.thread

    async def load_messages(
        self,
        thread_id: str,
        *,
        consistency: Consistency | None = None,
        at_least: Receipt | None = None,
        quarantined: Quarantined = "raise",
    ) -> list[Message] | None:
        """The thread's messages, oldest first. Arguments and errors as in `load_checkpoint`."""
        state = await self._state(thread_id, consistency, at_least, quarantined)
        return [decode_message(m) for m in state.messages] if state.thread is not None else None

    async def load_run(
        self, run_id: str, *, consistency: Consistency | None = None, quarantined: Quarantined = "raise"
    ) -> Run | None:
        """A run as it was last saved. Errors as in `load_checkpoint`."""
        check_choice(quarantined, Quarantined, "quarantined", InvalidQuery)
        return await self._runs.load(check_id(run_id, "run_id"), self._level(consistency), quarantined)

    async def latest_run(
        self,
        thread_id: str,
        *,
        consistency: Consistency | None = None,
        at_least: Receipt | None = None,
        quarantined: Quarantined = "raise",
    ) -> Run | None:
        """The run of the thread's newest checkpoint. Arguments and errors as in `load_checkpoint`."""
        state = await self._state(thread_id, consistency, at_least, quarantined)
        return decode_run(state.latest_run) if state.latest_run is not None else None

    async def load_thread_state(
        self,
        thread_id: str,
        *,
        consistency: Consistency | None = None,
        at_least: Receipt | None = None,
        quarantined: Quarantined = "raise",
    ) -> Any:
        """What `save_thread_state` saved last. Arguments and errors as in `load_checkpoint`.

        Also raises StoreUnavailable when Postgres is away and the log has the thread's messages, but not its state.
        """
        state = await self._state(thread_id, consistency, at_least, quarantined)
        if state.partial and state.state is None:
            down = self.lanes.of(thread_id).reads.store.reason
            raise StoreUnavailable(f"only Postgres knows the state of thread {thread_id!r}: {down}")
        return decode_message(state.state) if state.state is not None else None

    async def query_messages(
        self,
        thread_id: str,
        query: MessageQuery = ALL_MESSAGES,
        *,
        limit: int = LIMIT,
        cursor: str | None = None,
        consistency: Consistency | None = None,
    ) -> MessagePage:
        """See `Queryable.query_messages`; for the levels and errors of all queries, `bufstore.threads.lists`."""
        return await self._lists.messages(thread_id, query, limit, cursor, self._level(consistency))

    async def load_message(
        self, thread_id: str, message_id: str, *, consistency: Consistency | None = None
    ) -> MessageRecord | None:
        """See `Queryable.load_message`."""
        return await self._lists.message(thread_id, message_id, self._level(consistency))

    async def load_message_range(
        self, thread_id: str, first: int, last: int, *, consistency: Consistency | None = None
    ) -> list[MessageRecord]:
        """See `Queryable.load_message_range`."""
        return await self._lists.message_range(thread_id, first, last, self._level(consistency))

    async def query_runs(
        self,
        query: RunQuery = ALL_RUNS,
        *,
        limit: int = LIMIT,
        cursor: str | None = None,
        consistency: Consistency | None = None,
    ) -> RunPage:
        """See `Queryable.query_runs`."""
        return await self._lists.runs(query, limit, cursor, self._level(consistency))

    async def query_threads(
        self,
        query: ThreadQuery = ALL_THREADS,
        *,
        limit: int = LIMIT,
        cursor: str | None = None,
        consistency: Consistency | None = None,
    ) -> ThreadPage:
        """See `Queryable.query_threads`."""
        return await self._lists.threads(query, limit, cursor, self._level(consistency))

    async def _state(
        self, thread_id: str, level: Consistency | None, at_least: Receipt | None, quarantined: Quarantined
    ) -> ThreadState:
        check_id(thread_id, "thread_id")
        if at_least is not None and type(at_least) is not Receipt:
            raise InvalidQuery(f"at_least must be a Receipt, not {type(at_least).__name__}")
        if at_least is not None and at_least.thread_id != thread_id:
            raise ConfigError(f"the receipt is of thread {at_least.thread_id!r}, not {thread_id!r}")
        check_choice(quarantined, Quarantined, "quarantined", InvalidQuery)
        needed = at_least.thread_seq if at_least is not None else 0
        return await self.lanes.of(thread_id).reads.thread(thread_id, self._level(level), needed, quarantined)

    def _level(self, level: Consistency | None) -> Consistency:
        return self._consistency if level is None else check_choice(level, Consistency, "consistency", InvalidQuery)

    # --- administration ---------------------------------------------------------------------------------------

    async def force_flush(self, thread_id: str, *, timeout_s: float | None = None) -> None:
        """Return once the store has all of the thread that is acknowledged now, whichever process flushes it.

        Raises FlushTimeout after `timeout_s` (default ``flush_timeout_s``), LogUnavailable; StoreUnavailable when only
        Postgres knows which of the thread's entries wait.
        """
        check_id(thread_id, "thread_id")
        await self.lanes.force_flush(thread_id, timeout_s=timeout_s)

    async def force_flush_all(self, *, timeout_s: float | None = None) -> None:
        """Return once the store has everything that is acknowledged now. Raises like `force_flush`."""
        await self.lanes.force_flush_all(timeout_s=timeout_s)

    async def statistics(self) -> Statistics:
        """Return counters, how full the log is, and how long it has space; for all lanes together.

        Raises LogUnavailable.
        """
        return statistics_of_all(await self.lanes.each(lambda buffer: buffer.vitals.statistics()))

    async def health(self) -> Health:
        """Report what this process can do at this moment, and what is wrong.

        Asks NATS and Postgres, for two seconds at most. On a replicated log, the leader must prove that it leads.
        """
        return health_of_all(await self.lanes.each(lambda buffer: buffer.vitals.health()))

    async def quarantined(self) -> int:
        """Return how many entries are in quarantine. Raises StoreUnavailable."""
        return sum(await self.lanes.each(lambda buffer: buffer.quarantine.count()))

    async def verify(self) -> Verification:
        """Check log, shared state and Postgres against each other, while they are in use. Raises Unavailable errors.

        Reads every thread that the log shows, in bounded memory. Whatever it finds is damage, or a bug in bufstore:
        see docs/OPERATIONS.md.
        """
        return verification_of_all(await self.lanes.each(lambda buffer: buffer.verify()))

    async def lag(self) -> Mapping[int, int]:
        """Return, per partition, how many entries in the log its cursor has not passed. Raises Unavailable errors.

        The numbering runs on over the lanes: the second lane's partitions follow the first lane's.
        """
        lags = await self.lanes.each(lambda buffer: buffer.vitals.lag())
        return {lane * len(lag) + partition: n for lane, lag in enumerate(lags) for partition, n in lag.items()}
