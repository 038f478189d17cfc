"""What the write path asks of the domain: a thread's content, what a new entry adds to it, and who has a run's id."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from bufstore.buffer.chain import Watermark
from bufstore.buffer.entry import StoredEntry
from bufstore.buffer.ports.ledger import Ledger
from bufstore.buffer.ports.shared_state import SharedState
from bufstore.config import BufferConfig
from bufstore.errors import AlreadyExists, StoreUnavailable
from bufstore.failpoints import Failpoint, reach
from bufstore.threads.digests import MessageMemory, digests_of, ids_of_encoded
from bufstore.threads.model import Run
from bufstore.threads.payload import decode_payload
from bufstore.threads.read import STORE_PATIENCE_S, ThreadReads


class ThreadWriter:
    """See `bufstore.buffer.append.appender.Writer`."""

    def __init__(self, reads: ThreadReads, ledger: Ledger, shared: SharedState, config: BufferConfig) -> None:
        self._reads = reads
        self._ledger = ledger
        self._shared = shared
        self._config = config
        self._claimed_runs: OrderedDict[str, str] = OrderedDict()

    async def load_base(self, thread_id: str) -> tuple[int, Watermark, MessageMemory, bool]:
        """See `bufstore.buffer.append.appender.Writer`."""
        state, last = await self._reads.joined(thread_id)
        memory = MessageMemory(digests_of(state.messages), ids_of_encoded(state.messages))
        return last, state.watermark, memory, state.whole

    def nothing(self) -> MessageMemory:
        """See `bufstore.buffer.append.appender.Writer`."""
        return MessageMemory()

    def observe(self, memory: MessageMemory, entry: StoredEntry) -> None:
        """See `bufstore.buffer.append.appender.Writer`."""
        payload = decode_payload(entry.entry.payload)
        memory.replace(payload.keep, digests_of(payload.messages), ids_of_encoded(payload.messages))

    async def watermark(self, thread_id: str) -> Watermark:
        """The thread's row. Raises StoreUnavailable, soon."""
        try:
            # One small row, whatever the thread holds. And what was seen of the log before must not grow old meanwhile:
            # see `bufstore.buffer.append.tip_finder`.
            async with asyncio.timeout(STORE_PATIENCE_S):
                return await self._ledger.watermark(thread_id)
        except TimeoutError:
            raise StoreUnavailable("Postgres, which alone remembers this thread, does not answer") from None

    def claimed(self, run: Run) -> bool:
        """Whether this process has claimed the run lately."""
        return self._claimed_runs.get(run.run_id) == run.thread_id

    async def claim(self, run: Run) -> None:
        """Make the run findable and its id unique, once, before its first checkpoint. Raises AlreadyExists."""
        if self.claimed(run):
            return
        reach(Failpoint.CLAIM_BEFORE)
        owner = await self._shared.claim_run(run.run_id, run.thread_id, self._config.append_timeout_s)
        reach(Failpoint.CLAIM_STORED)
        if owner != run.thread_id:
            raise AlreadyExists(f"run {run.run_id!r} belongs to another thread")
        self._claimed_runs[run.run_id] = run.thread_id
        while len(self._claimed_runs) > self._config.cached_threads:
            self._claimed_runs.popitem(last=False)
