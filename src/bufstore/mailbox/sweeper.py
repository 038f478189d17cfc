"""Periodic work: takes back expired claims, signals due dispatches, purges old finished ones.

Every instance runs one; of n instances one at a time does the work. A pass is bounded and costs what is due; what it
leaves the next pass finds. Nothing ends it but `aclose`: an error is told once, waited out and tried again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Self

from bufstore.mailbox.store import MailboxStore

_log = logging.getLogger(__name__)

#: How long to wait after a failed pass at most, in intervals.
_WAIT_MAX = 6
_PURGES_PER_PASS = 10


class Sweeper:
    """Keeps one mailbox in order. ``async with Sweeper(mailbox): …`` in every process that works on it."""

    def __init__(self, mailbox: MailboxStore) -> None:
        self._mailbox = mailbox
        self._task: asyncio.Task[None] | None = None
        #: Why the last pass failed; None when it did not.
        self.trouble: str | None = None
        #: When a pass last succeeded here, even if another instance had the turn (monotonic seconds).
        self.last_pass: float | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="bufstore-mailbox-sweeper")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop. What is on its way is done or not."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def sweep(self) -> bool:
        """One pass, if it is this instance's turn; whether it was."""
        box, c = self._mailbox, self._mailbox.config
        if not await box.backend.sweeps(c.sweep_interval_s):
            return False
        with box.counters.timed("sweep"):
            reclaimed = await box.reclaim_expired(limit=c.sweep_limit)
            signalled = await box.backend.signal_due(box.backend.now_ms(), c.sweep_limit)
            box.counters.count("due_signalled", signalled)
            if c.keep_finished_s is not None:
                before = box.backend.now_ms() - round(1000 * c.keep_finished_s)
                for _ in range(_PURGES_PER_PASS):
                    if await box.purge_finished(max(0, before), limit=c.sweep_limit) < c.sweep_limit:
                        break
        box.counters.count("sweeps")
        for d in reclaimed:
            _log.warning(
                "took back dispatch %r of thread %r: %s, now %s",
                d.dispatch_id,
                d.thread_id,
                d.last_error,
                d.status.value,
                extra={"action": "mailbox_reclaimed"},
            )
        return True

    async def _run(self) -> None:
        failures = 0
        while True:
            # Not all instances at once.
            interval = self._mailbox.config.sweep_interval_s * random.uniform(0.9, 1.1)  # noqa: S311
            await asyncio.sleep(interval * min(_WAIT_MAX, 1 + failures))
            try:
                await self.sweep()
            except Exception as e:
                failures += 1
                self._mailbox.counters.count("sweep_failures")
                if self.trouble is None:
                    _log.warning(
                        "cannot sweep; tries again at the next interval: %s",
                        e,
                        exc_info=e,
                        extra={"action": "mailbox_sweep_failed"},
                    )
                self.trouble = f"{type(e).__name__}: {e}"
            else:
                failures, self.trouble, self.last_pass = 0, None, time.monotonic()
