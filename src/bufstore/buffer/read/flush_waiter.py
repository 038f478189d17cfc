"""Waits until something is flushed, by whichever instance flushes it.

The waiter asks the partition's owner to flush now, and listens to its progress reports. When a report arrives, and now
and then before, it asks Postgres, which holds the truth: a report may be lost, may tell of a commit that a failover has
lost, or may have passed an entry that waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from bufstore.buffer.flush.flusher import Flusher
from bufstore.buffer.flush.membership import owners
from bufstore.buffer.parts import AnyParts
from bufstore.errors import BufstoreError, Closed, FlushTimeout
from bufstore.tasks import set_within, spawn

_ASK_INTERVAL_S = 0.25
_SILENT = "Postgres did not say in time what is flushed"


class FlushWaiter:
    """Knows how far each partition is flushed, and waits for more. One per process and log."""

    def __init__(self, parts: AnyParts, flusher: Flusher | None) -> None:
        self._shared, self._ledger, self._subjects = parts.shared, parts.ledger, parts.subjects
        self._flusher = flusher
        self._progress: dict[int, int] = {}
        self._moved = asyncio.Event()

    async def start(self) -> None:
        """Subscribe to the progress reports."""
        await self._shared.on_progress(self._on_progress)

    def _on_progress(self, partition: int, seq: int) -> None:
        if seq > self._progress.get(partition, 0):
            self._progress[partition] = seq
            # The next report gets a new event: a waiter that takes the event before it looks misses no report.
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()

    async def thread(self, thread_id: str, target: int, timeout_s: float) -> None:
        """Return once the thread is flushed up to `target`. Raises FlushTimeout after `timeout_s`, and Closed."""
        partition = self._subjects.partition(thread_id)

        async def look() -> dict[int, int]:
            return {partition: (await self._ledger.watermark(thread_id)).flushed_seq}

        # Most likely the thread is not flushed yet, so ask the owner first, and Postgres after a report or a pause.
        await self._wait({partition: target}, look, thread_id, timeout_s, look_first=False)

    async def partitions(self, targets: Mapping[int, int], timeout_s: float) -> None:
        """Return once each partition is flushed up to its target. Raises FlushTimeout after `timeout_s`, and Closed.

        The cursors are not enough: they have passed the entries that wait.
        """
        if targets:
            await self._wait(targets, self._ledger.flushed, None, timeout_s, look_first=True)

    async def _wait(
        self,
        targets: Mapping[int, int],
        look: Callable[[], Awaitable[Mapping[int, int]]],
        thread_id: str | None,
        timeout_s: float,
        *,
        look_first: bool,
    ) -> None:
        left = targets
        reached: Mapping[int, int] = {}
        failed = ""
        inquiry: asyncio.Task[tuple[str, str]] | None = None
        loop = asyncio.get_running_loop()
        half_time = loop.time() + timeout_s / 2
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    moved = self._moved
                    if look_first or all(self._progress.get(p, 0) >= t for p, t in left.items()):
                        failed = _SILENT
                        try:
                            reached = found = await look()
                            failed = ""
                            left = {p: t for p, t in left.items() if found.get(p, 0) < t}
                            if not left:
                                return
                            # A report beyond what Postgres has is of a commit that no longer exists.
                            self._progress.update({p: found.get(p, 0) for p in left})
                        except Closed:
                            raise
                        except BufstoreError as e:
                            failed = str(e)
                    look_first = True
                    failed = await self._ask(left) or failed
                    if inquiry is None and loop.time() >= half_time:
                        inquiry = spawn(self._inquire(min(left)), name="bufstore-flush-inquiry")
                    await set_within(moved, min(_ASK_INTERVAL_S, timeout_s / 4))
        except TimeoutError:
            partition = min(left)
            who, trouble = self._ourselves(partition) or (inquiry.result() if inquiry and inquiry.done() else ("", ""))
            why = trouble or failed or ("it reports no trouble" if who else "")
            reason = f"{who} is responsible for flushing it: {why}" if who else why
            raise FlushTimeout(
                thread_id,
                target=left[partition],
                flushed=reached.get(partition, 0),
                reason=reason,
                partition=partition,
            ) from None
        finally:
            if inquiry is not None:
                inquiry.cancel()

    def _ourselves(self, partition: int) -> tuple[str, str] | None:
        """Return the name of this process and its trouble if it follows the partition, else None."""
        if self._flusher is None or not self._flusher.owns(partition):
            return None
        return "this process", self._flusher.state.trouble

    async def _inquire(self, partition: int) -> tuple[str, str]:
        """Return the owner of a partition and the trouble that it reports; empty texts if unknown."""
        try:
            members, troubles = await self._shared.members(), await self._shared.troubles()
        except BufstoreError:
            return "", ""
        owner = owners(members, self._subjects.partitions).get(partition)
        if owner is None:
            return "", "no flusher is alive"
        mine = self._flusher is not None and owner == self._flusher.member
        return "this process" if mine else f"flusher {owner}", troubles.get(owner, "")

    async def _ask(self, partitions: Mapping[int, int]) -> str:
        """Ask the owners to flush now. Returns why that failed; empty if it did not."""
        for partition in partitions:
            if self._flusher is not None and self._flusher.owns(partition):
                self._flusher.ask(partition)
                continue
            try:
                await self._shared.call_owner(partition)
            except Closed:
                raise
            except BufstoreError as e:
                return str(e)
        return ""
