"""The flush path: gather, coalesce, one transaction, ack, purge (see also `takeover`, `window_flusher`, `retention`).

Rule 1: Postgres holds the truth. Watermarks, cursors, terms and parked entries change only in its transactions;
leases, acks and this process's memory may be lost or wrong at any moment without losing an entry.
Rule 2: any doubt about a partition (a hole in its feed, another owner, a lost connection) ends in the same way: the
partition's memory is dropped, and the partition is taken again, from its cursor, with a higher term.

Theory of operation. A member renews its lease and computes the partitions that it owns. Taking a partition raises its
term in Postgres, which fences every earlier owner, and follows the log from the cursor. Every window, all owned
partitions are flushed in one transaction: it locks the watermarks in id order, `chain.plan` decides on them which
entries are applied, the domain coalesces these, watermarks and cursors move, and Postgres commits. Then come the
progress report and the ack, and later the purge.

Failure model. A transient error is retried from memory. When an error blames an entry, the batch is split by
partition, by thread, by entry; so a locked row delays only its own thread, and poison is parked alone. A thread that
waits for long waits in the ledger, and the cursor passes its entries. An error that only an operator can remove is
retried slowly and reported. The loops restart themselves after an unforeseen error.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential
from tenacity.stop import stop_when_event_set

from bufstore.buffer.flush.flusher_state import FlusherState
from bufstore.buffer.flush.idle import IdleCursors
from bufstore.buffer.flush.lease import Lease
from bufstore.buffer.flush.overdue import Overdue
from bufstore.buffer.flush.retention import Retention
from bufstore.buffer.flush.takeover import Takeover
from bufstore.buffer.flush.window_flusher import Later, WindowFlusher
from bufstore.buffer.parts import AnyParts
from bufstore.errors import BufstoreError
from bufstore.failpoints import Failpoint, reach
from bufstore.jetstream.messages import AppendUnknown
from bufstore.log_lines import LogLines
from bufstore.tasks import end, interrupted, own_cancels_only, set_within, spawn, unless

_log = LogLines(__name__)

_BACKOFF_MAX_S = 2.0
#: A loop that somebody has cancelled is begun anew after so many seconds.
_AGAIN_S = 0.5


class Flusher:
    """Flushes the partitions it owns; see the module's text. One per process and log."""

    def __init__(self, parts: AnyParts, member: str, prepare: Callable[[], Awaitable[None]]) -> None:
        """`member`: this process's name among the flushers. `prepare`: checks tables and log before the first flush."""
        log, shared, subjects, config = parts.log, parts.shared, parts.subjects, parts.config
        self._shared = shared
        self._config = config
        self._member = member
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._asked_at = float("-inf")
        self._window_began: float | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.state = FlusherState()
        self._takeover = Takeover(parts, member, prepare, self._wake.set, self.state)
        self._owned = self._takeover.owned_partitions
        self._window_flusher = WindowFlusher(parts, self._takeover, self.state)
        self._overdue = Overdue(log, self._owned, self._wake.set)
        self._log = log
        self._lease = Lease(
            shared,
            member,
            subjects.partitions,
            config.lease_s,
            self._takeover.want,
            self._takeover.hold,
            self._unable,
            lambda: self.state.trouble,
        )
        self._idle = IdleCursors(parts, self._owned)
        self._retention = Retention(parts, self._owned, self._takeover.compare)

    async def start(self) -> None:
        """Join the members and begin to flush."""
        await self._shared.on_call(self._on_call)
        self.state.running = True
        loops = {
            "lease": self._lease.keep,
            "takeover": self._takeover.keep,
            "flush": self._flush_windows,
            "overdue": self._overdue.keep,
            "retention": self._retention.keep,
        }
        for name, work in loops.items():
            self._begin(name, work)

    def _begin(self, name: str, work: Callable[[asyncio.Event], Awaitable[None]]) -> None:
        def begin_anew() -> None:
            if not self._stopping.is_set():
                self._begin(name, work)

        def ended(task: asyncio.Task[None]) -> None:
            if self._stopping.is_set():
                return
            for owned in self._owned.values():
                owned.doubt = owned.doubt or "the flusher was cancelled or interrupted"
            if interrupted(task):
                begin_anew()
            else:  # see `Sequencer`: perhaps somebody ends all tasks of the loop
                self._loop.call_later(_AGAIN_S, begin_anew)

        self._tasks[name] = spawn(self._supervise(name, work), name=f"bufstore-flusher-{name}")
        self._tasks[name].add_done_callback(ended)

    async def aclose(self, timeout_s: float | None = None) -> None:
        """Stop: finish the window that is on its way, give up the partitions, leave the members.

        `timeout_s`: after this time, whatever is still on its way is cancelled; None: ``flush_timeout_s``.
        """
        if not self.state.running:
            return
        reach(Failpoint.CLOSE_FLUSHED)
        self._stopping.set()
        self._wake.set()
        self._lease.members_changed()
        self._takeover.look()
        self._overdue.stop()
        # The next owners purge: this must not wait for a Postgres that does not answer.
        await end(self._tasks.pop("retention", None))
        if timeout_s is None:
            timeout_s = self._config.flush_timeout_s
        if self._tasks:
            _, late = await asyncio.wait(self._tasks.values(), timeout=timeout_s)
            await end(*late)
        await self._takeover.aclose()
        reach(Failpoint.CLOSE_GIVEN_UP)
        with contextlib.suppress(BufstoreError, AppendUnknown):
            await self._shared.leave(self._member)
        reach(Failpoint.CLOSE_LEFT)
        self.state.running = False

    def ask(self, partition: int) -> None:
        """Flush now instead of at the end of the window, including entries that arrive within the next second.

        `partition`: the one that a caller waits for; the caller asks again until it is flushed.
        """
        self._asked_at = self._loop.time()
        self._overdue.ask(partition)
        self._wake.set()

    @property
    def member(self) -> str:
        """This flusher's name among the members."""
        return self._member

    @property
    def trouble(self) -> str:
        """Why nothing is flushed here, or less than should be; empty when all is well."""
        return self.state.trouble or self._lease.trouble

    def cursors(self) -> dict[int, int]:
        """The position up to which each partition of this flusher is flushed."""
        return {partition: owned.cursor.seq for partition, owned in self._owned.items()}

    def owns(self, partition: int) -> bool:
        """Whether this flusher holds the partition."""
        return partition in self._owned

    def has_flushed(self, ends: Mapping[int, int]) -> bool:
        """Whether this flusher holds these partitions, has flushed them up to these positions, and nothing waits."""
        return all(
            (owned := self._owned.get(p)) is not None
            and owned.doubt is None
            and owned.cursor.seq >= end
            and not owned.unsettled
            for p, end in ends.items()
        )

    # --- supervision ------------------------------------------------------------------------------------------

    async def _supervise(self, name: str, work: Callable[[asyncio.Event], Awaitable[None]]) -> None:
        while not self._stopping.is_set():
            try:
                with own_cancels_only():
                    await work(self._stopping)
            except Exception as e:
                self.state.trouble = f"{name}: unexpected {type(e).__name__}"
                _log.exception(
                    "the flusher's %s loop failed and starts again; nothing is lost",
                    name,
                    extra={"action": "flusher_error"},
                )
                await self._pause(1.0)

    async def _pause(self, seconds: float) -> None:
        """Sleep for this long, or until stopped."""
        await set_within(self._stopping, seconds)

    # --- which partitions -------------------------------------------------------------------------------------

    def _unable(self) -> str | None:
        """Why this flusher, unlike others, cannot flush; None if it can."""
        why = self._log.refused
        if why is None:
            return None
        self.state.report(why)
        return why.reason

    def _on_call(self, partition: int) -> None:
        if partition < 0:
            self._lease.members_changed()
        elif partition in self._owned:
            self.ask(partition)

    # --- the window -------------------------------------------------------------------------------------------

    async def _flush_windows(self, stopping: asyncio.Event) -> None:
        pause = wait_random_exponential(multiplier=0.05, max=_BACKOFF_MAX_S)
        while True:
            await AsyncRetrying(
                wait=pause,
                retry=retry_if_exception_type(Later),
                stop=stop_when_event_set(stopping),  # type: ignore[arg-type]
                sleep=self._pause,
                before_sleep=self._count_retry,
                retry_error_callback=lambda _: None,
            )(self._window)
            if stopping.is_set():
                return

    def _count_retry(self, state: RetryCallState) -> None:
        self.state.retries += 1

    async def _window(self) -> None:
        """Gather entries until a window is due, then flush it."""
        while True:
            self._wake.clear()
            if not self._stopping.is_set():
                self._takeover.give_up()
            self._window_flusher.queues.adopt(self._loop.time())
            self._collect()
            self._overdue.judge()
            if self._idle.due and not self._stopping.is_set():
                # Whatever it moves, the next owners move: it must not hold up the end either.
                await unless(self._stopping, self._idle.advance())
            self.state.pending = sum(owned.unsettled for owned in self._owned.values())
            if not self.state.pending:
                self._clear_trouble()
                if self._loop.time() - self._asked_at < 1.0:
                    await self._takeover.compare_for_asker()
            wait = self._due_in()
            if wait <= 0:
                break
            if self._stopping.is_set():
                return
            await set_within(self._wake, wait)
        self._window_began = None
        if self.state.pending:
            self._asked_at = float("-inf")
        collecting = spawn(self._collect_meanwhile(), name="bufstore-flusher-collect")
        try:
            await self._window_flusher.settle_pending()
            await self._window_flusher.settle_waiting()
            await self._window_flusher.queue_waiting()
        finally:
            await end(collecting)
        self._clear_trouble()

    async def _collect_meanwhile(self) -> None:
        """Take what arrives for the next window, until cancelled, so that decoding it costs no time of its own."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._collect()

    def _collect(self) -> None:
        for owned in list(self._owned.values()):
            try:
                owned.collect()
            except Exception:
                _log.exception(
                    "cannot decode an entry of partition %d; the partition is taken over again; nothing is lost",
                    owned.cursor.partition,
                    extra={"action": "flusher_error"},
                )

    def _clear_trouble(self) -> None:
        if self._takeover.complete and self._log.refused is None:
            waiting, operator = self._window_flusher.trouble()
            self.state.clear(waiting, stopped=operator)

    def _due_in(self) -> float:
        """Return the seconds until the window must be flushed, at most one, so that lost feeds are noticed."""
        now = self._loop.time()
        waiting_due = self._window_flusher.waiting.soonest(now) - now
        count = self._window_flusher.ready()
        if not count:
            return 0 if self._stopping.is_set() else min(max(waiting_due, 0), 1.0)
        if self._window_began is None:
            self._window_began = now
        size = sum(owned.pending_bytes for owned in self._owned.values())
        full = count >= self._config.flush_max_entries // 2 or size >= self._config.flush_max_bytes // 2
        if now - self._asked_at < 1.0 or full or self._window_flusher.more or self._stopping.is_set():
            return 0
        return min(self._window_began + self._config.flush_interval_s - now, 1.0)
