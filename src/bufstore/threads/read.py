"""The read path: what the store holds, joined with the thread's tail in the log.

Both are asked at once. If the log's last entry of the thread is above the watermark, the tail between is fetched
and overlaid by the same decision that a flush of it makes. An entry may leave the log only `failover_window_s` after
Postgres has it, and no read takes half as long: so what one answer lacks the other has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from bufstore.buffer import elapsed
from bufstore.buffer.entry import assemble
from bufstore.buffer.ports.log import Log
from bufstore.buffer.ports.shared_state import SharedState
from bufstore.buffer.read.flush_waiter import FlushWaiter
from bufstore.buffer.subjects import Subjects
from bufstore.config import BufferConfig
from bufstore.errors import (
    BufstoreError,
    FlushTimeout,
    LogUnavailable,
    ReadNotFresh,
    StoreUnavailable,
    ThreadQuarantined,
)
from bufstore.jetstream.messages import AppendUnknown, StoredMessage
from bufstore.threads.base import StateReader
from bufstore.threads.model import Run, decode_run
from bufstore.threads.overlay import ThreadState, from_log_alone, overlay
from bufstore.types import Consistency, Quarantined

_log = logging.getLogger(__name__)

#: How long a call waits for Postgres before it tries to do with the log alone, or gives up.
STORE_PATIENCE_S = 2.0
_PROBE_INTERVAL_S = 0.25
#: A run that nobody has: to ask for it costs the store little.
_PROBE = "bufstore-probe"


class ThreadReads:
    """Reads threads and runs at a consistency level."""

    def __init__(
        self,
        log: Log,
        shared: SharedState,
        subjects: Subjects,
        store: StateReader,
        waiter: FlushWaiter,
        config: BufferConfig,
        own_seq: Callable[[str], int],
    ) -> None:
        self._log = log
        self._shared = shared
        self._subjects = subjects
        self._store = store
        self._waiter = waiter
        self._config = config
        self._own_seq = own_seq
        self._probe: asyncio.Task[None] | None = None
        self._question: asyncio.Task[None] | None = None
        #: Questions to the store that nobody waits for any more.
        self._ending: set[asyncio.Task[ThreadState]] = set()
        #: Why Postgres is taken for down; None while it answers.
        self.store_down: str | None = None

    async def aclose(self) -> None:
        """Stop looking whether Postgres is back."""
        await _give_up(self._probe, self._question, *self._ending)

    async def thread(
        self,
        thread_id: str,
        level: Consistency,
        at_least: int = 0,
        quarantined: Quarantined = "raise",
        *,
        proven: bool = True,
    ) -> ThreadState:
        """The thread's state; one without `thread` if it does not exist.

        `at_least`: a position that the state must include. `proven`: see `joined`.

        Raises ReadNotFresh when the level cannot be reached in `read_timeout_s`, StoreUnavailable when only Postgres
        could tell and it does not answer, ThreadQuarantined.
        """
        needed = max(at_least, self._own_seq(thread_id)) if level is not Consistency.EVENTUAL else at_least
        try:
            async with asyncio.timeout(self._config.read_timeout_s):
                if level is Consistency.EVENTUAL:
                    state = await self._until(thread_id, lambda: self._store.state(thread_id), needed)
                elif level is Consistency.STRONG:
                    target = max(await self.force_flush(thread_id, self._config.read_timeout_s), needed)
                    state = await self._until(thread_id, lambda: self._store.state(thread_id), target)
                else:
                    state = await self._until(thread_id, lambda: self._joined_state(thread_id, proven), needed)
        except TimeoutError:
            raise ReadNotFresh(f"thread {thread_id!r} could not be read as {level.value} in time") from None
        except (FlushTimeout, LogUnavailable, AppendUnknown) as e:
            raise ReadNotFresh(f"thread {thread_id!r} could not be read as {level.value}: {e}") from e
        if state.watermark.broken_since is not None and level is not Consistency.EVENTUAL and quarantined == "raise":
            raise ThreadQuarantined(thread_id, state.watermark.broken_since)
        return state

    async def run(self, run_id: str, level: Consistency, quarantined: Quarantined = "raise") -> Run | None:
        """The run as it was last saved; None if nobody knows it."""
        if level is Consistency.EVENTUAL:
            return await self._store.run(run_id)
        thread_id = await self._thread_of_run(run_id)
        if thread_id is None:
            return None
        state = await self.thread(thread_id, level, quarantined=quarantined)
        return await self._run_of(run_id, state)

    async def has_run(self, run_id: str, state: ThreadState) -> bool:
        """Whether the thread of this state has such a run."""
        run = await self._run_of(run_id, state)
        return run is not None

    async def _run_of(self, run_id: str, state: ThreadState) -> Run | None:
        if state.thread is None:
            return None
        if run_id in state.tail_runs:
            return decode_run(state.tail_runs[run_id])
        if state.deleted:
            return None
        if state.latest_run is not None:
            latest = decode_run(state.latest_run)
            if latest.run_id == run_id:
                return latest
        if state.partial:
            whole, _ = await self.joined(state.thread.thread_id, proven=True)
            if whole.partial:
                raise StoreUnavailable(f"only Postgres can tell about run {run_id!r}: {self.store_down}")
            return await self._run_of(run_id, whole)
        # Not in the tail, so it is older than the watermark, where the store has it.
        return await self._store.run(run_id)

    async def force_flush(self, thread_id: str, timeout_s: float) -> int:
        """Wait until everything of the thread that is in the log now is flushed; up to which position that is."""
        try:
            async with asyncio.timeout(timeout_s):
                last = await self._log.latest(self._subjects.of(thread_id), timeout_s)
        except TimeoutError:
            raise LogUnavailable("the log does not tell in time what is to be flushed") from None
        if last:
            await self._waiter.thread(thread_id, last, timeout_s)
        return last

    async def joined(self, thread_id: str, *, proven: bool = False) -> tuple[ThreadState, int]:
        """The thread's state with its tail, and the position of its last entry in the log (0: none there).

        `proven`: it has all that was acknowledged to anybody before the call. Without, a leader that the others have
        left may tell how it was seconds ago; that is enough for whoever writes on condition that it is so.

        Raises StoreUnavailable when only Postgres could tell, and it is down or does not tell in `read_timeout_s`;
        LogUnavailable.
        """
        subject = self._subjects.of(thread_id)
        loop = asyncio.get_running_loop()
        while True:
            began = elapsed.now_s()
            deadline = loop.time() + self._config.read_timeout_s
            asked = None if self.store_down is not None else loop.create_task(self._store.state(thread_id))
            in_log = loop.create_task(self._last(subject, proven))
            try:
                state = await self._stored(asked, deadline) if asked is not None else None
                last = await in_log
            except BaseException:
                await _give_up(in_log, asked)
                raise
            if state is None:
                state, last = await self._without_store(thread_id, asked, deadline, last, proven)
            elif last > state.watermark.flushed_seq:
                state, last = await self._with_tail(thread_id, state, last, proven)
            # A pause in between (of this process or machine, say) may have outlived an entry in the log: look again.
            if elapsed.now_s() - began < self._log.windows.rely_s / 2:
                return state, last

    async def _with_tail(self, thread_id: str, state: ThreadState, last: int, proven: bool) -> tuple[ThreadState, int]:
        """`state` with what the log holds above it, at least up to `last`, and the position of the last of that."""
        messages, last = await self._tail(thread_id, state.watermark.flushed_seq, last, proven)
        if not messages:
            return state, last
        items = assemble(messages, thread_id)
        joined = overlay(state, thread_id, items)
        if joined.watermark.broken_since is not None and state.watermark.broken_since is None:
            # Either an entry is missing because Postgres has moved since, or the chain is really broken.
            joined = overlay(await self._store.state(thread_id), thread_id, items)
        return joined, last

    async def _tail(self, thread_id: str, above: int, last: int, proven: bool) -> tuple[list[StoredMessage], int]:
        """The thread's messages in the log above a position, at least up to `last` if that is still there.

        And the position of the thread's last message there, 0 for none.
        """
        subject = self._subjects.of(thread_id)
        pause = 0.001
        while last > above:
            messages = await self._log.after(subject, above, self._config.read_timeout_s)
            if messages and messages[-1].seq >= last:
                return messages, messages[-1].seq
            # It is gone since, or this came from one who had not got it: nothing is told without what stands there.
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.25)
            last = await self._last(subject, proven)
        return [], last

    async def _joined_state(self, thread_id: str, proven: bool) -> ThreadState:
        return (await self.joined(thread_id, proven=proven))[0]

    async def _until(self, thread_id: str, read: Callable[[], object], needed: int) -> ThreadState:
        """Read until the state includes position `needed`; the caller bounds the time."""
        pause = 0.005
        while True:
            state = await read()  # type: ignore[misc]
            assert isinstance(state, ThreadState)
            if state.watermark.flushed_seq >= needed or (
                not state.watermark.flushed_seq and await self._gone(thread_id, needed)
            ):
                return state
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.25)

    async def _gone(self, thread_id: str, needed: int) -> bool:
        """Whether a thread without a row had position `needed`, and was deleted, purged and buried since.

        The log that has come so far shows nothing of it; so it is purged, and was committed long before.
        """
        if await self._last(self._subjects.of(thread_id), proven=False):
            return False
        return await self._log.end(self._config.read_timeout_s) >= needed

    async def _last(self, subject: str, proven: bool) -> int:
        if proven:
            return await self._log.latest(subject, self._config.read_timeout_s)
        found = (await self._log.last([subject], self._config.read_timeout_s)).get(subject)
        return found.seq if found is not None else 0

    async def _stored(self, asked: asyncio.Task[ThreadState], deadline: float) -> ThreadState | None:
        """What the store answers, however long it takes for that as long as it is up; None if it does not answer.

        One thread may take long: whether the store is down, a small question tells.
        """
        while not await self._done(asked, deadline, self._patience / 2):
            if deadline <= asyncio.get_running_loop().time() or (await self._is_down() and not asked.done()):
                return None
        try:
            return asked.result()
        except StoreUnavailable:
            pass
        except BufstoreError:
            raise
        except Exception as e:
            # An app's own store raises its driver's errors; whatever they mean, it did not answer.
            _log.debug("a read of the store failed: %s", type(e).__name__, extra={"action": "store_read_failed"})
        await self._is_down()
        return None

    async def _done(self, asked: asyncio.Task[ThreadState], deadline: float, within_s: float) -> bool:
        """Wait so long for the store's answer, at most until `deadline`; whether it is there."""
        left = max(deadline - asyncio.get_running_loop().time(), 0)
        done, _ = await asyncio.wait([asked], timeout=min(within_s, left))
        return bool(done)

    @property
    def _patience(self) -> float:
        return min(STORE_PATIENCE_S, self._config.read_timeout_s / 2)

    async def _is_down(self) -> bool:
        """Whether the store does not answer a small question either, asked once for all who want to know."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._ask(), name="bufstore-store-question")
        await asyncio.shield(self._question)
        return self.store_down is not None

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._store.run(_PROBE)
        except TimeoutError:
            self._take_for_down("it did not answer in time")
        except Exception as e:
            self._take_for_down(str(e) if isinstance(e, BufstoreError) else type(e).__name__)

    def _take_for_down(self, reason: str) -> None:
        """Do not make every read wait for a Postgres that is away: one task looks whether it is back."""
        if self.store_down is None:
            self.store_down = reason
            _log.warning("reads do without Postgres: %s", reason, extra={"action": "store_down"})
            self._probe = asyncio.create_task(self._look_for_store(), name="bufstore-store-probe")

    async def _look_for_store(self) -> None:
        while self.store_down is not None:
            with contextlib.suppress(Exception):  # whatever an app's store raises: it is not back yet
                await self._store.run(_PROBE)
                self.store_down = None
                _log.info("Postgres is back", extra={"action": "store_up"})
                return
            await asyncio.sleep(_PROBE_INTERVAL_S)

    async def _without_store(
        self, thread_id: str, asked: asyncio.Task[ThreadState] | None, deadline: float, last: int, proven: bool
    ) -> tuple[ThreadState, int]:
        """What the log tells without the store, else what the store tells after all. `asked`: it was, before."""
        try:
            messages, last = await self._tail(thread_id, 0, last, proven)
            state = from_log_alone(thread_id, assemble(messages, thread_id))
            if state is not None:
                return state, last
            if asked is None or asked.done():
                asked = asyncio.create_task(self._store.state(thread_id))
            while not await self._done(asked, deadline, self._patience):
                late = asyncio.get_running_loop().time() >= deadline
                if late or self.store_down is not None:
                    reason = self.store_down or "it did not tell in BufferConfig.read_timeout_s"
                    raise StoreUnavailable(f"only Postgres can tell about thread {thread_id!r}: {reason}")
            stored = asked.result()
        finally:
            self._let_go(asked)
        return await self._with_tail(thread_id, stored, last, proven)

    def _let_go(self, asked: asyncio.Task[ThreadState] | None) -> None:
        """End the question, without waiting for that: a server that hangs takes its time for it."""
        if asked is not None:
            self._ending.add(asked)
            asked.add_done_callback(self._ended)
            asked.cancel()

    def _ended(self, asked: asyncio.Task[ThreadState]) -> None:
        self._ending.discard(asked)
        if not asked.cancelled():
            asked.exception()  # or asyncio complains that nobody looked at it

    async def _thread_of_run(self, run_id: str) -> str | None:
        try:
            async with asyncio.timeout(self._config.read_timeout_s):
                with contextlib.suppress(LogUnavailable):
                    thread_id = await self._shared.thread_of_run(run_id, self._config.read_timeout_s)
                    if thread_id is not None:
                        return thread_id
                # The key may have expired (then Postgres has the run), or the bucket was lost: then a run that is
                # only in the log is not found before it is flushed.
                run = await self._store.run(run_id)
                if run is None:
                    await self.force_flush_all(self._config.read_timeout_s)
                    run = await self._store.run(run_id)
        except (TimeoutError, FlushTimeout, LogUnavailable) as e:
            raise ReadNotFresh(f"run {run_id!r} could not be looked up in time: {e}") from None
        return run.thread_id if run is not None else None

    async def force_flush_all(self, timeout_s: float) -> None:
        """Wait until everything that is in the log now is flushed."""
        filters = [self._subjects.of_partition(p) for p in range(self._subjects.partitions)]
        await self._log.prove_leader(timeout_s)
        ends = await self._log.ends(filters, timeout_s)
        await self._waiter.partitions({p: seq for p, seq in enumerate(ends) if seq}, timeout_s)


async def _give_up(*tasks: asyncio.Task[Any] | None) -> None:
    """End these tasks, if they have not ended; nobody wants their answers any more."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
