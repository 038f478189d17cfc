"""Threads, messages and runs in memory: the store that every other store must agree with."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from bufstore.buffer.domain import Backing
from bufstore.config import BufferConfig
from bufstore.errors import AlreadyExists, IdempotencyConflict, VersionConflict
from bufstore.memory.ledger import MemoryLedger
from bufstore.threads import edits, lineage
from bufstore.threads.coalesce import Fold
from bufstore.threads.edited_store import EditedStore
from bufstore.threads.message_pages import LAST, check_range, message_page, of_list
from bufstore.threads.model import (
    Checkpoint,
    Run,
    Thread,
    ThreadChange,
    check_run,
    check_version,
    decode_message,
    decode_run,
    encode_messages,
    encode_run,
    encoded_ids,
)
from bufstore.threads.protocol import kind_of
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
    check_limit,
    check_message_id,
    check_query,
    page_of,
    read_position,
    record_of,
)
from bufstore.threads.state import ThreadState
from bufstore.threads.state_readers import ComparingReader
from bufstore.threads.write import save_of
from bufstore.types import Message, Receipt, check_id

_REMEMBERED_KEYS = 16


class MemoryThreadStore(EditedStore):
    """A `ThreadRunStore` that forgets everything with the process. Holds encoded bytes, never the caller's objects."""

    #: See `WrappableStore`.
    store_kind = "bufstore.memory"

    def __init__(self) -> None:
        self._threads: dict[str, Thread] = {}
        self._messages: dict[str, list[bytes]] = {}
        self._runs: dict[str, tuple[str, bytes]] = {}  # run id -> thread id, record
        self._states: dict[str, bytes] = {}
        #: The value of `_clock` when each thread was last changed, and when each run was created.
        self._changed: dict[str, int] = {}
        self._created: dict[str, int] = {}
        self._clock = 0
        self._last: dict[str, Receipt] = {}
        #: The last checkpoints' (idempotency key, content) per thread.
        self._keys: dict[str, deque[tuple[str, object]]] = {}
        self._ledgers: dict[int, MemoryLedger] = {}

    def ledger(self, quarantine_max: int, lane: int = 0) -> MemoryLedger:
        """The ledger for the watermarks of the buffers in front of this store: one for all buffers of the same lane."""
        if lane not in self._ledgers:
            self._ledgers[lane] = MemoryLedger(self, quarantine_max=quarantine_max)
        return self._ledgers[lane]

    def behind(
        self, postgres: str | None, config: BufferConfig, timeout_s: float
    ) -> tuple[MemoryLedger, Backing[ThreadState]] | None:
        """What a buffer in front of this store works with; None when its watermarks are to be in a database."""
        if postgres is not None:
            return None
        ledger = self.ledger(config.quarantine_max, config.log.lane)
        return ledger, Backing(kind_of(self), ComparingReader(self, ledger), held=self._held)

    async def _held(self, thread_ids: Sequence[str]) -> list[str]:
        return [thread_id for thread_id in thread_ids if thread_id in self._threads]

    async def checkpoint(
        self, thread_id: str, messages: Sequence[Message], run: Run, *, idempotency_key: str | None = None
    ) -> Receipt:
        """See `ThreadRunStore.checkpoint`."""
        payloads, record = _encoded(thread_id, messages, run, idempotency_key)
        content = ("whole", payloads, record)
        repeated = self._repeated(thread_id, idempotency_key, content)
        if repeated is not None:
            return repeated
        await self._check_parent(run)
        change = _change(thread_id, 0, payloads, run, record, whole=True)
        return await self._save(change, idempotency_key, content)

    async def checkpoint_append(
        self,
        thread_id: str,
        delta: Sequence[Message],
        run: Run,
        *,
        expected_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> Receipt:
        """See `ThreadRunStore.checkpoint_append`."""
        payloads, record = _encoded(thread_id, delta, run, idempotency_key)
        check_version(expected_version)
        new = encoded_ids(payloads)
        if len(set(new)) < len(new):
            raise AlreadyExists(f"thread {thread_id!r}: two of the messages to append have the same id")
        content = ("append", payloads, record)
        repeated = self._repeated(thread_id, idempotency_key, content)
        if repeated is not None:
            return repeated
        before = self._messages.get(thread_id, [])
        if expected_version not in (None, len(before)):
            self._check_run(run.run_id, thread_id)
            raise VersionConflict(thread_id, expected=expected_version, actual=len(before))
        if set(new) & set(encoded_ids(before)):
            raise AlreadyExists(f"thread {thread_id!r}: a message to append has an id that is taken")
        await self._check_parent(run)
        change = _change(thread_id, len(before), payloads, run, record, whole=False)
        return await self._save(change, idempotency_key, content)

    async def apply(self, connection: object, batch: Sequence[ThreadChange]) -> None:
        """Write `batch`, all of it or nothing; `connection` is not used. Raises AlreadyExists for a taken run id."""
        owners: dict[str, str] = {}
        for change in batch:
            for run_id in change.runs:
                self._check_run(run_id, change.thread_id)
                if owners.setdefault(run_id, change.thread_id) != change.thread_id:
                    raise AlreadyExists("a run id belongs to another thread")
        for change in sorted(batch, key=lambda change: change.thread_seq):
            self._apply(change)
        seqs = [(change.run_seqs.get(run_id, 0), run_id) for change in batch for run_id in change.runs]
        for _, run_id in sorted(seqs):
            self._created.setdefault(run_id, self._tick())

    def _apply(self, change: ThreadChange) -> None:
        thread_id = change.thread_id
        if change.deleted:
            self._forget(thread_id)
            if change.gone:
                return
        self._messages[thread_id] = self._messages.get(thread_id, [])[: change.keep] + list(change.messages)
        self._threads[thread_id] = change.project(self._threads.get(thread_id, Thread(thread_id=thread_id)))
        self._changed[thread_id] = self._tick()
        if change.state is not None:
            self._states[thread_id] = change.state
        for run_id, record in change.runs.items():
            self._runs[run_id] = (thread_id, record)

    def _forget(self, thread_id: str) -> None:
        for rows in (self._threads, self._messages, self._states, self._changed, self._keys):
            rows.pop(thread_id, None)
        for run_id in [run_id for run_id, (owner, _) in self._runs.items() if owner == thread_id]:
            del self._runs[run_id]
            self._created.pop(run_id, None)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    async def load_checkpoint(self, thread_id: str) -> Checkpoint | None:
        """See `ThreadReader.load_checkpoint`."""
        thread = await self.load_thread(thread_id)
        if thread is None:
            return None
        messages = [decode_message(m) for m in self._messages[thread_id]]
        return Checkpoint(
            thread=thread,
            messages=messages,
            latest_run=await self.latest_run(thread_id),
            state=await self.load_thread_state(thread_id),
        )

    async def load_thread(self, thread_id: str) -> Thread | None:
        """See `ThreadReader.load_thread`."""
        return self._threads.get(check_id(thread_id, "thread_id"))

    async def load_messages(self, thread_id: str) -> list[Message] | None:
        """See `ThreadReader.load_messages`."""
        checkpoint = await self.load_checkpoint(thread_id)
        return None if checkpoint is None else checkpoint.messages

    async def load_run(self, run_id: str) -> Run | None:
        """See `ThreadReader.load_run`."""
        row = self._runs.get(check_id(run_id, "run_id"))
        return None if row is None else decode_run(row[1])

    async def latest_run(self, thread_id: str) -> Run | None:
        """See `ThreadReader.latest_run`."""
        thread = await self.load_thread(thread_id)
        if thread is None or thread.latest_run_id is None:
            return None
        return await self.load_run(thread.latest_run_id)

    async def load_thread_state(self, thread_id: str) -> Any:
        """See `ThreadReader.load_thread_state`."""
        state = self._states.get(check_id(thread_id, "thread_id"))
        return None if state is None else decode_message(state)

    async def query_messages(
        self, thread_id: str, query: MessageQuery = ALL_MESSAGES, *, limit: int = LIMIT, cursor: str | None = None
    ) -> MessagePage:
        """See `Queryable.query_messages`."""
        messages = self._messages.get(check_id(thread_id, "thread_id"), [])
        return await message_page(thread_id, query, limit, cursor, of_list(messages))

    async def load_message(self, thread_id: str, message_id: str) -> MessageRecord | None:
        """See `Queryable.load_message`."""
        check_message_id(message_id)
        records = await self.load_message_range(thread_id, 1, LAST)
        return next((r for r in records if r.message_id == message_id), None)

    async def load_message_range(self, thread_id: str, first: int, last: int) -> list[MessageRecord]:
        """See `Queryable.load_message_range`."""
        first, last = check_range(first, last)
        found = self._messages.get(check_id(thread_id, "thread_id"), [])[first - 1 : last]
        return [record_of(thread_id, seq, payload) for seq, payload in enumerate(found, first)]

    async def query_runs(self, query: RunQuery = ALL_RUNS, *, limit: int = LIMIT, cursor: str | None = None) -> RunPage:
        """See `Queryable.query_runs`."""
        check_query(query, RunQuery)
        behind = read_position(cursor, query) or (0, "")
        found = [
            ((self._created[run_id], run_id), run)
            for run_id, (thread_id, record) in self._runs.items()
            if query.thread_id in (None, thread_id) and run_id.startswith(query.id_prefix or "")
            for run in [decode_run(record)]
            if query.status in (None, run.status)
        ]
        found = sorted((row for row in found if row[0] > behind), key=itemgetter(0))
        runs, next_cursor = page_of(query, check_limit(limit), found)
        return RunPage(runs=runs, next_cursor=next_cursor)

    async def query_threads(
        self, query: ThreadQuery = ALL_THREADS, *, limit: int = LIMIT, cursor: str | None = None
    ) -> ThreadPage:
        """See `Queryable.query_threads`."""
        check_query(query, ThreadQuery)
        position = read_position(cursor, query)
        found = [
            ((self._changed[t.thread_id], t.thread_id), t)
            for t in self._threads.values()
            if query.resource_id in (None, t.metadata.resource_id)
            and query.parent_thread_id in (None, t.parent_thread_id)
            and not (query.roots and t.parent_thread_id is not None)
            and t.thread_id.startswith(query.id_prefix or "")
        ]
        found = [row for row in found if position is None or row[0][0] < position[0]]
        threads, next_cursor = page_of(query, check_limit(limit), sorted(found, key=itemgetter(0), reverse=True))
        return ThreadPage(threads=threads, next_cursor=next_cursor)

    # -- edits ---------------------------------------------------------------------------------------------------

    async def _check_parent(self, run: Run) -> None:
        await lineage.NamedParents(self.load_thread).check(run)

    async def _change(self, wanted: lineage.LineageChange) -> Receipt:
        # Nothing here suspends, so nothing comes between.
        family = lineage.Family(self.load_thread, self._children, self._edit)
        await lineage.check(family, wanted)
        return await lineage.carry_out(family, wanted)

    async def _children(self, thread_id: str) -> list[str]:
        return [t.thread_id for t in self._threads.values() if t.parent_thread_id == thread_id]

    async def _edit(self, wanted: edits.WantedEdit) -> Receipt:
        thread_id = wanted.thread_id
        known = edits.Known(
            self._threads.get(thread_id), self._messages.get(thread_id, []), wanted.run_id in self._runs
        )
        fold = Fold(thread_id, len(known.messages))
        fold.add(wanted.decide(known), 0, self_contained=False)
        await self.apply(None, [fold.change()])
        return self._receipt(thread_id, fold.change().version)

    async def aclose(self) -> None:
        """Nothing to release."""

    def _repeated(self, thread_id: str, key: str | None, content: object) -> Receipt | None:
        for known, known_content in self._keys.get(thread_id, ()):
            if known == key:
                if known_content != content:
                    raise IdempotencyConflict(f"thread {thread_id!r}: this key was used with different content")
                last = self._last[thread_id]
                return Receipt(last.thread_id, last.thread_seq, last.id, last.version, repeated=True)
        return None

    async def _save(self, change: ThreadChange, key: str | None, content: object) -> Receipt:
        await self.apply(None, [change])
        thread_id = change.thread_id
        # A checkpoint without a key takes a place among the remembered keys too.
        keys = self._keys.setdefault(thread_id, deque(maxlen=_REMEMBERED_KEYS))
        keys.append((key or secrets.token_hex(8), content))
        return self._receipt(thread_id, change.version)

    def _receipt(self, thread_id: str, version: int) -> Receipt:
        last = self._last.get(thread_id)
        receipt = Receipt(thread_id, last.thread_seq + 1 if last else 1, secrets.randbits(63), version)
        self._last[thread_id] = receipt
        return receipt

    def _check_run(self, run_id: str, thread_id: str) -> None:
        if run_id in self._runs and self._runs[run_id][0] != thread_id:
            raise AlreadyExists(f"run {run_id!r} belongs to a thread other than {thread_id!r}")


def _encoded(thread_id: str, messages: Sequence[Message], run: Run, key: str | None) -> tuple[list[bytes], bytes]:
    check_id(thread_id, "thread_id")
    check_run(run, thread_id)
    if key is not None:
        check_id(key, "idempotency_key")
    return encode_messages(messages), encode_run(run)


def _change(thread_id: str, keep: int, payloads: list[bytes], run: Run, record: bytes, *, whole: bool) -> ThreadChange:
    return ThreadChange(
        thread_id=thread_id,
        keep=keep,
        messages=payloads,
        whole=whole,
        runs={run.run_id: record},
        saves=[save_of(run)],
    )
