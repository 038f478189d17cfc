"""Threads, messages and runs in memory: what every other store must agree with."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

from bufstore.errors import AlreadyExists, IdempotencyConflict, VersionConflict
from bufstore.threads.message_pages import LAST, check_range, message_page
from bufstore.threads.model import (
    Checkpoint,
    Run,
    RunSave,
    Thread,
    ThreadChange,
    decode_message,
    decode_run,
    encode_messages,
    encode_run,
)
from bufstore.threads.queries import (
    ALL_MESSAGES,
    LIMIT,
    MessagePage,
    MessageQuery,
    MessageRecord,
    check_message_id,
    record_of,
)
from bufstore.types import Message, Receipt, check_id

_REMEMBERED_KEYS = 16


class MemoryThreadStore:
    """A `ThreadRunStore` that forgets everything with the process. Holds encoded bytes, never the caller's objects."""

    def __init__(self) -> None:
        self._threads: dict[str, Thread] = {}
        self._messages: dict[str, list[bytes]] = {}
        self._runs: dict[str, tuple[str, bytes]] = {}  # run id -> thread id, record
        self._last: dict[str, Receipt] = {}
        #: The last checkpoints' (idempotency key, content) per thread.
        self._keys: dict[str, deque[tuple[str, object]]] = {}

    async def checkpoint(
        self, thread_id: str, messages: Sequence[Message], run: Run, *, idempotency_key: str | None = None
    ) -> Receipt:
        """See `ThreadRunStore.checkpoint`."""
        payloads, record = _encoded(thread_id, messages, run, idempotency_key)
        content = ("whole", payloads, record)
        repeated = self._repeated(thread_id, idempotency_key, content)
        if repeated is not None:
            return repeated
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
        content = ("append", payloads, record)
        repeated = self._repeated(thread_id, idempotency_key, content)
        if repeated is not None:
            return repeated
        before = self._messages.get(thread_id, [])
        if expected_version not in (None, len(before)):
            self._check_run(run.run_id, thread_id)
            raise VersionConflict(thread_id, expected=expected_version, actual=len(before))
        new, old = _ids(payloads), _ids(before)
        if len(set(new)) < len(new) or set(new) & set(old):
            raise AlreadyExists(f"thread {thread_id!r}: a message to append has an id that is taken")
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
        for change in batch:
            thread_id = change.thread_id
            before = self._messages.get(thread_id, [])
            self._messages[thread_id] = before[: change.keep] + list(change.messages)
            self._threads[thread_id] = change.project(self._threads.get(thread_id, Thread(thread_id=thread_id)))
            for run_id, record in change.runs.items():
                self._runs[run_id] = (thread_id, record)

    async def load_checkpoint(self, thread_id: str) -> Checkpoint | None:
        """See `ThreadReader.load_checkpoint`."""
        thread = await self.load_thread(thread_id)
        if thread is None:
            return None
        messages = [decode_message(m) for m in self._messages[thread_id]]
        return Checkpoint(thread=thread, messages=messages, latest_run=await self.latest_run(thread_id))

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

    async def query_messages(
        self, thread_id: str, query: MessageQuery = ALL_MESSAGES, *, limit: int = LIMIT, cursor: str | None = None
    ) -> MessagePage:
        """See `Queryable.query_messages`."""

        async def fetch(low: int, high: int, count: int, newest_first: bool) -> list[tuple[int, bytes]]:
            found = list(enumerate(self._messages.get(thread_id, ()), 1))[low - 1 : high]
            return (found[::-1] if newest_first else found)[:count]

        return await message_page(thread_id, query, limit, cursor, fetch)

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

    async def aclose(self) -> None:
        """Nothing to release."""

    def _repeated(self, thread_id: str, key: str | None, content: object) -> Receipt | None:
        for known, known_content in self._keys.get(thread_id, ()):
            if known == key:
                if known_content != content:
                    raise IdempotencyConflict(f"thread {thread_id!r}: this key was used with other content")
                last = self._last[thread_id]
                return Receipt(last.thread_id, last.thread_seq, last.id, last.version, repeated=True)
        return None

    async def _save(self, change: ThreadChange, key: str | None, content: object) -> Receipt:
        await self.apply(None, [change])
        thread_id = change.thread_id
        # A checkpoint without a key takes a place among the remembered ones, too.
        keys = self._keys.setdefault(thread_id, deque(maxlen=_REMEMBERED_KEYS))
        keys.append((key or secrets.token_hex(8), content))
        last = self._last.get(thread_id)
        receipt = Receipt(thread_id, last.thread_seq + 1 if last else 1, secrets.randbits(63), change.version)
        self._last[thread_id] = receipt
        return receipt

    def _check_run(self, run_id: str, thread_id: str) -> None:
        if run_id in self._runs and self._runs[run_id][0] != thread_id:
            raise AlreadyExists(f"run {run_id!r} belongs to another thread than {thread_id!r}")


def _encoded(thread_id: str, messages: Sequence[Message], run: Run, key: str | None) -> tuple[list[bytes], bytes]:
    check_id(thread_id, "thread_id")
    run.check(thread_id)
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
        saves=[RunSave(run.run_id, run.status, run.parent_thread_id)],
    )


def _ids(payloads: Sequence[bytes]) -> list[Any]:
    decoded = map(decode_message, payloads)
    return [m["id"] for m in decoded if isinstance(m, dict) and isinstance(m.get("id"), str)]
