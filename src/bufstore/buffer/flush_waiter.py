"""Waiting until something is flushed, by whichever instance flushes it.

The owner of a partition is asked to flush now, its progress reports are heard, and Postgres is asked now and then: a
report may be lost, the truth is there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from bufstore.buffer.flusher import Flusher
from bufstore.buffer.ports import HotState, Ledger
from bufstore.buffer.subjects import Subjects
from bufstore.errors import BufstoreError, FlushTimeout

_ASK_INTERVAL_S = 0.25


class FlushWaiter:
    """Knows how far each partition is flushed, and waits for more. One per process and log."""

    def __init__(self, hot: HotState, ledger: Ledger, subjects: Subjects, flusher: Flusher | None) -> None:
        self._hot = hot
        self._ledger = ledger
        self._subjects = subjects
        self._flusher = flusher
        self._progress: dict[int, int] = {}
        self._moved = asyncio.Event()

    async def start(self) -> None:
        """Hear the progress reports."""
        await self._hot.on_progress(self._on_progress)

    def _on_progress(self, partition: int, seq: int) -> None:
        if seq > self._progress.get(partition, 0):
            self._progress[partition] = seq
            self._moved.set()

    async def thread(self, thread_id: str, target: int, timeout_s: float) -> None:
        """Return once the thread is flushed up to `target`. Raises FlushTimeout after `timeout_s`."""
        partition = self._subjects.partition(thread_id)

        async def flushed() -> int:
            return (await self._ledger.row(thread_id)).flushed_seq

        await self._wait({partition: target}, {partition: flushed}, thread_id, timeout_s)

    async def partitions(self, targets: Mapping[int, int], timeout_s: float) -> None:
        """Return once each partition is flushed up to its target. Raises FlushTimeout after `timeout_s`."""

        def cursor_of(partition: int) -> Callable[[], Awaitable[int]]:
            async def flushed() -> int:
                cursor = (await self._ledger.cursors()).get(partition)
                return cursor.seq if cursor is not None else 0

            return flushed

        await self._wait(targets, {p: cursor_of(p) for p in targets}, None, timeout_s)

    async def _wait(
        self,
        targets: Mapping[int, int],
        flushed: Mapping[int, Callable[[], Awaitable[int]]],
        thread_id: str | None,
        timeout_s: float,
    ) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        left = dict(targets)
        reached, reason = 0, ""
        try:
            async with asyncio.timeout_at(deadline):
                first = True
                while True:
                    left = {p: t for p, t in left.items() if self._progress.get(p, 0) < t}
                    if not left:
                        return
                    if not first:
                        for partition in list(left):
                            try:
                                reached = await flushed[partition]()
                            except BufstoreError as e:
                                reason = str(e)
                                continue
                            if reached >= left[partition]:
                                del left[partition]
                        if not left:
                            return
                    first = False
                    reason = await self._ask(left) or reason
                    self._moved.clear()
                    with contextlib.suppress(asyncio.TimeoutError):
                        async with asyncio.timeout(_ASK_INTERVAL_S):
                            await self._moved.wait()
        except TimeoutError:
            if self._flusher is not None:
                reason = self._flusher.state.trouble or reason
            target = max(left.values(), default=0)
            raise FlushTimeout(thread_id, target=target, flushed=reached, reason=reason) from None

    async def _ask(self, partitions: Mapping[int, int]) -> str:
        """Ask the owners to flush now; why that failed, or nothing."""
        for partition in partitions:
            if self._flusher is not None and self._flusher.owns(partition):
                self._flusher.ask()
                continue
            try:
                await self._hot.call_owner(partition)
            except BufstoreError as e:
                return str(e)
        return ""
