"""Periodic work: take back expired claims, signal due work and work that no signal tells of, purge finished dispatches.

Every instance runs a sweeper, but only one at a time does the work. A pass is bounded, and its cost depends on what is
due; the next pass finds what it leaves. Only `aclose` ends a sweeper: after an error it logs once, waits, and goes on.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Self

from bufstore.log_lines import LogLines
from bufstore.mailbox.store import MailboxStore
from bufstore.tasks import Lasting, own_cancels_only

_log = LogLines(__name__)

#: The longest wait after a failed pass, in sweep intervals.
_WAIT_MAX = 6
_PARTS_PER_PASS = 10
_LOST = {"action": "mailbox_resignalled"}
_RECLAIMED = {"action": "mailbox_reclaimed"}
_FAILED = {"action": "mailbox_sweep_failed"}


class Sweeper:
    """Keeps one mailbox in order. ``async with Sweeper(mailbox): …`` in every process that works on it."""

    def __init__(self, mailbox: MailboxStore) -> None:
        self._mailbox = mailbox
        self._task: Lasting | None = None
        #: Why the last pass failed, or a part of it; None when nothing did.
        self.trouble: str | None = None
        #: When a pass last succeeded here, even if another instance had the turn (monotonic seconds); None: never yet.
        self.last_pass: float | None = None

    async def __aenter__(self) -> Self:
        self._task = Lasting(self._run, name="bufstore-mailbox-sweeper")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop. A step that is on its way may or may not be done."""
        if self._task is not None:
            await self._task.aclose()

    async def sweep(self) -> bool:
        """Make one pass if it is this instance's turn; return whether it was.

        Each of its parts is done even if another one fails (see `trouble`). Raises the first error if all fail.
        """
        box, c = self._mailbox, self._mailbox.config
        if not await box.backend.sweeps(c.sweep_interval_s):
            self.trouble = None
            return False
        began_ms = box.backend.now_ms()
        parts = (
            partial(self._parts, self._reclaim),
            partial(self._parts, self._signal_due),
            partial(self._signal_lost, began_ms),
            self._purge,
        )
        errors: list[Exception] = []
        with box.counters.timed("sweep"):
            for part in parts:
                try:
                    await part()
                except Exception as e:  # a claim that can never be taken back must not keep the others from work
                    errors.append(e)
        if len(errors) == len(parts):
            raise errors[0]
        if errors:
            self._note(errors[0])
        else:
            self.trouble = None
        box.counters.count("sweeps")
        return True

    def _note(self, e: Exception) -> None:
        self._mailbox.counters.count("sweep_failures")
        if self.trouble is None:
            _log.warning("cannot sweep; will try again: %s", e, exc_info=e, extra=_FAILED)
        self.trouble = f"{type(e).__name__}: {e}"

    async def _signal_lost(self, began_ms: int) -> None:
        box, c = self._mailbox, self._mailbox.config
        # The signals of what has become due since the last pass or two are on their way. What becomes due during this
        # pass is signalled by the next one, however long this one takes.
        due_ms = began_ms - round(2000 * c.sweep_interval_s)
        lost = await box.backend.signal_lost(due_ms, c.sweep_limit)
        if lost:
            _log.warning("signalled %d threads that had work but no signal", lost, extra=_LOST)
        box.counters.count("resignalled", lost)

    async def _purge(self) -> None:
        box, keep_s = self._mailbox, self._mailbox.config.keep_finished_s
        if keep_s is not None:
            before = max(0, box.backend.now_ms() - round(1000 * keep_s))
            await self._parts(lambda limit: box.purge_finished(before, limit=limit))

    async def _parts(self, part: Callable[[int], Awaitable[int]]) -> None:
        """Do one part after the other, until one is not full."""
        limit = self._mailbox.config.sweep_limit
        for _ in range(_PARTS_PER_PASS):
            if await part(limit) < limit:
                break

    async def _reclaim(self, limit: int) -> int:
        reclaimed = await self._mailbox.reclaim_expired(limit=limit)
        for d in reclaimed:
            what = d.dispatch_id, d.thread_id, d.last_error, d.status.value
            _log.warning("took back dispatch %r of thread %r: %s, now %s", *what, extra=_RECLAIMED)
        return len(reclaimed)

    async def _signal_due(self, limit: int) -> int:
        signalled = await self._mailbox.backend.signal_due(self._mailbox.backend.now_ms(), limit)
        self._mailbox.counters.count("due_signalled", signalled)
        return signalled

    async def _run(self) -> None:
        failures = 0
        while True:
            # The jitter keeps the instances from sweeping all at once.
            interval = self._mailbox.config.sweep_interval_s * random.uniform(0.9, 1.1)  # noqa: S311
            await asyncio.sleep(interval * min(_WAIT_MAX, 1 + failures))
            try:
                with own_cancels_only():
                    await self.sweep()
            except Exception as e:
                failures += 1
                self._note(e)
            else:
                failures, self.last_pass = 0, time.monotonic()
