"""What the entries of a log of threads mean: see `bufstore.buffer.domain.Domain`."""

from __future__ import annotations

from collections.abc import Sequence

from bufstore.buffer.chain import Watermark
from bufstore.buffer.entry import StoredEntry
from bufstore.threads.coalesce import coalesce
from bufstore.threads.digests import MessageMemory, digests_of, ids_of_encoded
from bufstore.threads.model import NO_METADATA, Thread, ThreadChange, encode_metadata
from bufstore.threads.payload import decode_payload
from bufstore.threads.state import ThreadState

#: How many bytes each part of a state takes beside its encoded content.
_OBJECT_BYTES = 48


class ThreadsDomain:
    """Threads of messages, with runs."""

    def coalesce(self, thread_id: str, version: int, entries: Sequence[StoredEntry]) -> ThreadChange:
        return coalesce(thread_id, version, entries)

    def empty(self, thread_id: str, watermark: Watermark) -> ThreadState:
        return ThreadState(watermark=watermark)

    def overlay(self, state: ThreadState, thread_id: str, change: ThreadChange, watermark: Watermark) -> ThreadState:
        if change.deleted:
            state = ThreadState(watermark=watermark, deleted=True)
            if change.gone:
                return state
        thread = change.project(state.thread or Thread(thread_id=thread_id))
        latest = thread.latest_run_id
        return ThreadState(
            watermark=watermark,
            thread=thread,
            messages=[*state.messages[: change.keep], *change.messages],
            latest_run=change.runs.get(latest, state.latest_run) if latest is not None else None,
            tail_runs={**state.tail_runs, **change.runs},
            state=change.state if change.state is not None else state.state,
            deleted=state.deleted,
        )

    def nothing(self) -> MessageMemory:
        return MessageMemory()

    def remember(self, state: ThreadState) -> MessageMemory:
        return MessageMemory(digests_of(state.messages), ids_of_encoded(state.messages))

    def size(self, state: ThreadState) -> int:
        if state.thread is None:
            return 0  # the row that is left of a deleted thread may be removed at any time
        records = sum(map(len, state.tail_runs.values())) + len(state.latest_run or b"") + len(state.state or b"")
        if state.thread.metadata != NO_METADATA:
            records += len(encode_metadata(state.thread.metadata))
        count = 2 + len(state.messages) + 2 * len(state.tail_runs)
        return _OBJECT_BYTES * count + sum(map(len, state.messages)) + records

    def observe(self, memory: MessageMemory, entry: StoredEntry) -> None:
        payload = decode_payload(entry.entry.payload)
        memory.replace(payload.keep, digests_of(payload.messages), ids_of_encoded(payload.messages))


THREADS = ThreadsDomain()
