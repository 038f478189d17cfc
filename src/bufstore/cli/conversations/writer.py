"""Writing conversations as an agent does: one checkpoint after every message."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from bufstore.cli.conversations.latencies import Latencies
from bufstore.errors import FlushTimeout, LogFull, OutcomeUnknown, Rejected, Unavailable
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.threads.model import Run, RunStatus
from bufstore.types import MAX_ID_BYTES, Receipt

#: How many seconds a checkpoint is retried while the log is full or away. A full log has room again once flushed
#: entries may leave it, which takes the log's `failover_window_s`.
_PATIENCE_S = 180.0
#: How many seconds a flush may make no progress.
_STANDSTILL_S = 30.0
_FLUSH_ROUND_S = 5.0


class Written(NamedTuple):
    """What was written of one thread."""

    #: How many checkpoints were acknowledged.
    acknowledged: int
    #: The position of the last acknowledged one in the log.
    thread_seq: int
    #: Why the thread was left before its end; None: it was not.
    refused: Rejected | None


class ConversationWriter:
    """Writes threads into a store and counts."""

    def __init__(self, store: BufferedThreadStore) -> None:
        self._store = store
        self.tried = 0
        self.acknowledged = 0
        #: Durations of the acknowledged calls.
        self.latencies = Latencies()

    async def write(
        self, thread_id: str, messages: Sequence[Any], *, think: Callable[[], Awaitable[None]] | None = None
    ) -> Written:
        """Write a thread, with a checkpoint after every message; `think` is awaited before each.

        A thread without messages gets one checkpoint: without one it would not exist. Raises Unavailable, LogFull or
        OutcomeUnknown when the log stays away or full.
        """
        acknowledged = thread_seq = 0
        lengths = range(1, len(messages) + 1) if messages else range(1)
        for length in lengths:
            if think is not None:
                await think()
            done = length == len(messages)
            run = Run(
                run_id=run_id_of(thread_id),
                thread_id=thread_id,
                status=RunStatus.DONE if done else RunStatus.RUNNING,
                steps=length,
            )
            self.tried += 1
            try:
                receipt = await self._checkpoint(thread_id, messages[:length], run)
            except Rejected as e:
                if isinstance(e, LogFull):
                    raise
                return Written(acknowledged, thread_seq, e)
            self.acknowledged += 1
            acknowledged += 1
            thread_seq = receipt.thread_seq
        return Written(acknowledged, thread_seq, None)

    async def _checkpoint(self, thread_id: str, messages: Sequence[Any], run: Run) -> Receipt:
        key: str | None = None

        async def attempt() -> Receipt:
            nonlocal key
            began = time.perf_counter()
            try:
                receipt = await self._store.checkpoint(thread_id, messages, run, idempotency_key=key)
            except OutcomeUnknown as e:
                key = e.token
                raise
            self.latencies.add(time.perf_counter() - began)
            return receipt

        retrying = AsyncRetrying(
            retry=retry_if_exception_type((LogFull, Unavailable, OutcomeUnknown)),
            wait=wait_random_exponential(multiplier=0.05, max=2),
            stop=stop_after_delay(_PATIENCE_S),
            reraise=True,
        )
        return await retrying(attempt)


def run_id_of(thread_id: str) -> str:
    """Return the id of the one run of a thread that no agent wrote: the same whenever the thread is written again."""
    run_id = f"import:{thread_id}"
    if len(run_id.encode()) <= MAX_ID_BYTES:
        return run_id
    return f"import:{blake2b(thread_id.encode(), digest_size=32).hexdigest()}"


async def flush_all(store: BufferedThreadStore) -> None:
    """Flush what is acknowledged now. Raises FlushTimeout when the flush makes no progress any longer."""
    loop = asyncio.get_running_loop()
    left: int | None = None
    moved_at = loop.time()
    while True:
        try:
            await store.force_flush_all(timeout_s=_FLUSH_ROUND_S)
            return
        except FlushTimeout:
            behind: int | None = None
            with contextlib.suppress(Unavailable):  # an unknown lag is no sign of progress
                behind = sum((await store.lag()).values())
            if behind is not None and (left is None or behind < left):
                left, moved_at = behind, loop.time()
            elif loop.time() - moved_at > _STANDSTILL_S:
                raise
