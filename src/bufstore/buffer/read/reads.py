"""The read path: what the store holds, joined with the thread's tail in the log.

Both are asked at once. If the log's last entry of the thread is above the watermark, the tail between is fetched
and overlaid by the same decision that a flush of it makes. An entry may leave the log only `failover_window_s` after
Postgres has it, flushed or waiting (`bufstore.buffer.read.with_waiting`), and no read takes half as long: so what one
answer lacks the other has.

Of a thread that was read before (`bufstore.buffer.read.recent_states`) the store tells only its watermark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from bufstore.buffer import elapsed
from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import S, State, StateReader
from bufstore.buffer.entry import Item, items_of
from bufstore.buffer.parts import Parts
from bufstore.buffer.read.flush_waiter import FlushWaiter
from bufstore.buffer.read.overlay import from_log_alone, overlay
from bufstore.buffer.read.recent_states import Kept, Link, RecentStates, links_of
from bufstore.buffer.read.restored import Restored
from bufstore.buffer.read.store_watch import STORE_PATIENCE_S, StoreWatch
from bufstore.buffer.read.with_waiting import WithWaiting
from bufstore.errors import (
    FlushTimeout,
    LogUnavailable,
    ReadNotFresh,
    StoreUnavailable,
    ThreadQuarantined,
)
from bufstore.home import Home
from bufstore.jetstream.messages import AppendUnknown, StoredMessage
from bufstore.tasks import end, spawn
from bufstore.types import Consistency, Quarantined

T = TypeVar("T")

#: Of what was read last, so much is kept.
_RECENT_BYTES = 32 << 20
#: How long the watermark of what is kept may take.
_ROW_S = 0.5


class Reads(Generic[S]):
    """Reads threads at a consistency level."""

    def __init__(
        self,
        parts: Parts[Any, S, Any],
        reader: StateReader[S],
        waiter: FlushWaiter,
        own_seq: Callable[[str], int],
    ) -> None:
        """`own_seq`: up to which position this process itself has written to a thread, as far as it remembers."""
        self._domain, self._log, self._ledger = parts.domain, parts.log, parts.ledger
        self._subjects, self._config = parts.subjects, parts.config
        self._home = Home()
        #: Whether what Postgres says counts.
        self.restored = Restored(parts)
        #: What is flushed, and that with what waits in the ledger.
        self._reader, self._with_waiting = reader, WithWaiting(parts, reader, self.restored)
        self._waiter = waiter
        self._own_seq = own_seq
        self._recent: RecentStates[S] = RecentStates(_RECENT_BYTES)
        parts.log.on_forget(self._on_forget)
        #: Whether the store answers.
        self.store = StoreWatch(self._with_waiting, parts.config.read_timeout_s)

    async def aclose(self) -> None:
        """Stop looking whether the store is back."""
        await self.store.aclose()
        await self.restored.aclose()

    def _on_forget(self, everything: bool) -> None:
        if everything:
            self._recent.forget_all()

    async def thread(
        self,
        thread_id: str,
        level: Consistency,
        at_least: int = 0,
        quarantined: Quarantined = "raise",
        *,
        proven: bool = True,
    ) -> S:
        """The thread's state; the domain's empty one if it does not exist.

        `at_least`: a position that the state must include. `proven`: see `joined`.

        Raises ReadNotFresh when the level cannot be reached in `read_timeout_s`, StoreUnavailable when only Postgres
        could tell and it does not answer, ThreadQuarantined.
        """
        self._home.check()
        needed = max(at_least, self._own_seq(thread_id)) if level is not Consistency.EVENTUAL else at_least
        try:
            async with asyncio.timeout(self._config.read_timeout_s):
                if level is Consistency.EVENTUAL:
                    state = await self._until(thread_id, lambda: self._reader.state(thread_id), needed)
                elif level is Consistency.STRONG:
                    target = max(await self.force_flush(thread_id, self._config.read_timeout_s), needed)
                    state = await self.restored.counting(
                        lambda: self._until(thread_id, lambda: self._reader.state(thread_id), target)
                    )
                else:
                    state = await self._until(thread_id, lambda: self._joined_state(thread_id, proven), needed)
        except TimeoutError:
            raise ReadNotFresh(f"thread {thread_id!r} could not be read as {level.value} in time") from None
        except (FlushTimeout, LogUnavailable, AppendUnknown) as e:
            raise ReadNotFresh(f"thread {thread_id!r} could not be read as {level.value}: {e}") from e
        broken_since = state.watermark.broken_since
        if broken_since is not None and level is not Consistency.EVENTUAL and quarantined == "raise":
            raise ThreadQuarantined(thread_id, broken_since)
        return state

    async def watermark(self, thread_id: str) -> Watermark:
        """The thread's watermark once what waits in the ledger is flushed. Raises StoreUnavailable, soon."""
        try:
            # One small row, whatever the thread holds. And what was seen of the log before must not grow old meanwhile:
            # see `bufstore.buffer.append.tip_finder`.
            async with asyncio.timeout(STORE_PATIENCE_S):
                return await self._with_waiting.watermark(thread_id)
        except TimeoutError:
            raise StoreUnavailable("Postgres, which alone remembers this thread, does not answer") from None

    async def watermarks(self, thread_ids: Sequence[str]) -> dict[str, Watermark]:
        """The watermarks of many threads, in one question; threads that have none are left out.

        Where entries wait in the ledger (`Watermark.waits_to`), they are not counted in. Raises StoreUnavailable.
        """
        if self.store.down is not None:
            raise StoreUnavailable(self.store.down)
        found = await self.restored.counting(lambda: self.store.while_up(self._ledger.watermarks(thread_ids)))
        return {t: row for t, (row, _) in found.items()}

    async def force_flush(self, thread_id: str, timeout_s: float) -> int:
        """Wait until everything of the thread that is acknowledged now is flushed; up to which position that is."""
        self._home.check()
        left_s = _left_of(timeout_s)
        last = await self._told(lambda s: self._log.latest(self._subjects.of(thread_id), s), thread_id, left_s())
        last = last or await self._asked(self._waits_to(thread_id), thread_id, left_s())
        if last:
            await self._waiter.thread(thread_id, last, left_s())
        return last

    async def force_flush_all(self, timeout_s: float) -> None:
        """Wait until everything that is acknowledged now is flushed."""
        self._home.check()
        left_s = _left_of(timeout_s)
        filters = [self._subjects.of_partition(p) for p in range(self._subjects.partitions)]
        targets = dict(enumerate(await self._told(lambda s: self._log.latest_ends(filters, s), None, left_s())))
        if not all(targets.values()):
            passed = await self._asked(self._ledger.cursors(), None, left_s())
            targets = {p: end or (passed[p].seq if p in passed else 0) for p, end in targets.items()}
        await self._waiter.partitions({p: seq for p, seq in targets.items() if seq}, left_s())
        await self._asked(self.restored.counts_since(self.restored.era), None, left_s())

    async def _waits_to(self, thread_id: str) -> int:
        return (await self.restored.counting(lambda: self._ledger.watermark(thread_id))).waits_to

    async def _told(self, ask: Callable[[float], Awaitable[T]], thread_id: str | None, timeout_s: float) -> T:
        """What the log answers. A log that does not answer is to blame only where it has the time that a read has."""
        own_s, late = self._config.read_timeout_s, "the log did not say in time what must be flushed"
        try:
            async with asyncio.timeout(timeout_s):
                return await ask(max(timeout_s, own_s))
        except TimeoutError:
            if timeout_s < own_s:
                raise FlushTimeout(thread_id, target=0, flushed=0, reason=late) from None
            raise LogUnavailable(late) from None

    async def _asked(self, answer: Awaitable[T], thread_id: str | None, timeout_s: float) -> T:
        """What Postgres answers: of what the log shows nothing any more, entries may still wait there."""
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            reason = "Postgres did not say in time which entries wait"
            raise FlushTimeout(thread_id, target=0, flushed=0, reason=reason) from None

    async def joined(self, thread_id: str, *, proven: bool = False) -> tuple[S, int]:
        """The thread's state with its tail, and the position of its last entry in the log (0: none there).

        `proven`: it has all that was acknowledged to anybody before the call. Without, a leader that the others have
        left may show the state of seconds ago; that is enough for a writer whose write holds only if the state still is
        so.

        Raises StoreUnavailable when only Postgres could tell, and it is down or does not tell in `read_timeout_s`;
        LogUnavailable.
        """
        kept = self._recent.get(thread_id, elapsed.now_s()) if self.store.down is None else None
        found = await self._continued(thread_id, kept, proven) if kept is not None else None
        if found is None:
            found = await self._from_store(thread_id, proven)
        self._recent.keep(thread_id, found)
        return found.state, found.last

    async def _continued(self, thread_id: str, kept: Kept[S], proven: bool) -> Kept[S] | None:
        """What was read before, with what came since, where the watermark says so; None: read it again."""
        subject, began = self._subjects.of(thread_id), elapsed.now_s()
        row = spawn(self._with_waiting.watermark(thread_id))
        try:
            last = await self._last(subject, proven)
            new: list[Item] = []
            if last > kept.last:
                tail = await self._log.seen_after({subject: kept.last}, self._config.read_timeout_s)
                new = items_of(tail[subject], thread_id)
            # A store that does not answer is for who knows how long to wait for it.
            await asyncio.wait([row], timeout=_ROW_S)
            if not row.done() or row.exception() is not None:
                return None
            if elapsed.now_s() - began > self._log.windows.rely_s / 2:
                return None  # a pause: what was written behind the row may be purged
            found = kept.anchored(row.result(), links_of(new), last)
        finally:
            self.store.let_go(row)  # to cancel a statement takes as long as a store that hangs likes
        if found is None or not new:
            return found
        state = overlay(self._domain, kept.state, thread_id, new)
        return found._replace(state=state, size=self._size(state)) if not _broken(state) else None

    def _size(self, state: S) -> int:
        """How much of what may be kept it takes; 0: it may not be kept."""
        mark = state.watermark
        judged = mark.applied_id and not mark.gone and not mark.waits_to and not _broken(state)
        return self._domain.size(state) if judged and state.whole else 0

    async def _from_store(self, thread_id: str, proven: bool) -> Kept[S]:
        """See `joined`."""
        subject = self._subjects.of(thread_id)
        loop = asyncio.get_running_loop()
        while True:
            began = elapsed.now_s()
            deadline = loop.time() + self._config.read_timeout_s
            asked = None if self.store.down is not None else self.store.ask(thread_id)
            in_log = spawn(self._last(subject, proven))
            try:
                state = await self.store.stored(asked, deadline) if asked is not None else None
                era = self.restored.era  # in which the state was answered, and counted
                last = await in_log
            except BaseException:
                self.store.let_go(asked)
                await end(in_log)
                raise
            if state is None:
                found = await self._without_store(thread_id, asked, deadline, last, proven)
            else:
                found = await self._with_tail(thread_id, state, era, last, proven)
            # A pause in between (of this process or machine, say) may have outlived an entry in the log: look again.
            if found is not None and elapsed.now_s() - began < self._log.windows.rely_s / 2:
                return found._replace(asked_at=began)

    async def _joined_state(self, thread_id: str, proven: bool) -> S:
        return (await self.joined(thread_id, proven=proven))[0]

    async def _with_tail(self, thread_id: str, state: S, era: int, last: int, proven: bool) -> Kept[S] | None:
        """`state` with what the log holds above it, at least up to `last`, if that is above it.

        None: when it was answered, in `era`, Postgres may have had less than it must have.
        """
        messages: list[StoredMessage] = []
        if last > state.watermark.flushed_seq:
            messages, last = await self._tail(thread_id, state.watermark.flushed_seq, last, proven)
        # Behind the first look at the log, which may have set its floor.
        if not await self.restored.counts_since(era):
            return None
        if not messages:
            return self._read(state, state, last, [])
        items = items_of(messages, thread_id)
        joined = overlay(self._domain, state, thread_id, items)
        if _broken(joined) and not _broken(state):
            # Either an entry is missing because Postgres has moved since, or the chain is really broken.
            joined = overlay(self._domain, await self._with_waiting.state(thread_id), thread_id, items)
            return self._read(joined, joined, last, None)
        return self._read(joined, state, last, links_of(items))

    def _read(self, state: S, stored: S, last: int, behind: list[Link] | None) -> Kept[S]:
        """What was read. `stored`: without the tail. `behind`: the tail; None: it is not to be kept."""
        anchor = (stored.watermark.flushed_seq, stored.watermark.applied_id)
        known = behind is not None and stored.watermark.applied_id and not stored.watermark.waits_to
        return Kept(state, last, 0.0, anchor, behind or (), self._size(state) if known else 0)

    async def _without_store(
        self, thread_id: str, asked: asyncio.Task[S] | None, deadline: float, last: int, proven: bool
    ) -> Kept[S] | None:
        """What the log tells without the store, else what the store tells after all. `asked`: it was, before."""
        try:
            messages, last = await self._tail(thread_id, 0, last, proven)
            state = from_log_alone(self._domain, thread_id, items_of(messages, thread_id))
            if state is not None:
                return self._read(state, state, last, None)
            stored = await self.store.told_after_all(thread_id, asked, deadline)
        finally:
            self.store.let_go(asked)
        return await self._with_tail(thread_id, stored, self.restored.era, last, proven)

    async def _tail(self, thread_id: str, above: int, last: int, proven: bool) -> tuple[list[StoredMessage], int]:
        """The thread's messages in the log above a position, at least up to `last` if that is still there.

        And the position of the thread's last message there, 0 for none.
        """
        subject = self._subjects.of(thread_id)
        pause = 0.001
        while last > above:
            # The look that told of `last` has seen all up to it: to look again would cost a request.
            messages = (await self._log.seen_after({subject: above}, self._config.read_timeout_s))[subject]
            if messages and messages[-1].seq >= last:
                return messages, messages[-1].seq
            # It has left since, or the server that answered lacked it: report nothing without what stands there.
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.25)
            last = await self._last(subject, proven)
        return [], last

    async def _until(self, thread_id: str, read: Callable[[], Awaitable[S]], needed: int) -> S:
        """Read until the state includes position `needed`; the caller bounds the time."""
        pause = 0.005
        while True:
            state = await read()
            flushed, waits = state.watermark.flushed_seq, state.watermark.waits_to
            if flushed >= needed or (not flushed and not waits and await self._gone(thread_id, needed)):
                return state
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.25)

    async def _gone(self, thread_id: str, needed: int) -> bool:
        """Whether a thread without a watermark had position `needed`, and was deleted, purged and buried since.

        The log that has come so far shows nothing of it; so it is purged, and was committed long before.
        """
        subject = self._subjects.of(thread_id)
        if await self._last(subject, proven=False) or await self._log.end(self._config.read_timeout_s) < needed:
            return False
        return not await self._last(subject, proven=True)  # the node that told the end need not be the first one

    async def _last(self, subject: str, proven: bool) -> int:
        if proven:
            return await self._log.latest(subject, self._config.read_timeout_s)
        return (await self._log.ends([subject], self._config.read_timeout_s))[0]


def _broken(state: State) -> bool:
    return state.watermark.broken_since is not None


def _left_of(timeout_s: float) -> Callable[[], float]:
    """What is left of this time, from now on."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + timeout_s
    return lambda: max(0.0, ends_at - loop.time())
