"""The read path: what the store holds, joined with the thread's tail in the log.

A read asks both at once. If the log's last entry of the thread is above the watermark, the read fetches the tail
between them and overlays it by the same decision that a flush of it makes. An entry may leave the log only
`failover_window_s` after Postgres has it, flushed or waiting (`bufstore.buffer.read.with_waiting`), and no read takes
half as long. So whatever one answer lacks, the other has.

If a thread was read before (`bufstore.buffer.read.recent_states`), the store is asked only for its watermark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from bufstore import elapsed
from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import Backing, S, State
from bufstore.buffer.entry import Item, items_of
from bufstore.buffer.parts import Parts
from bufstore.buffer.read.flush_waiter import FlushWaiter
from bufstore.buffer.read.overlay import from_log_alone, overlay
from bufstore.buffer.read.recent_states import Kept, Link, RecentStates, links_of
from bufstore.buffer.read.restored import Restored
from bufstore.buffer.read.same_postgres import SamePostgres
from bufstore.buffer.read.store_watch import STORE_PATIENCE_S, StoreWatch
from bufstore.buffer.read.with_waiting import WithWaiting
from bufstore.errors import (
    ConfigError,
    FlushTimeout,
    LogUnavailable,
    ReadNotFresh,
    StoreUnavailable,
    ThreadQuarantined,
)
from bufstore.home import Home
from bufstore.jetstream.messages import AppendUnknown, StoredMessage
from bufstore.tasks import end, spawn, while_awake
from bufstore.types import Consistency, Quarantined

T = TypeVar("T")

#: How many bytes of the states that were read last are kept.
_RECENT_BYTES = 32 << 20
#: How long a read waits for the watermark of a state that is kept, in seconds.
_ROW_S = 0.5
#: Reads that the log leaves unanswered one after another, not further apart than these seconds, are of one outage.
_ONE_OUTAGE_S = 60.0
#: How long the log counts as one that answers no reads after it refused one for lack of a right, in seconds.
_REFUSED_FOR_S = 10.0


class Reads(Generic[S]):
    """Reads threads at a consistency level."""

    def __init__(
        self,
        parts: Parts[Any, S, Any],
        backing: Backing[S],
        waiter: FlushWaiter,
        own_seq: Callable[[str], int],
    ) -> None:
        """`own_seq`: returns the last position that this process has written to a thread, as far as it remembers."""
        self._domain, self._log, self._ledger = parts.domain, parts.log, parts.ledger
        self._subjects, self._config = parts.subjects, parts.config
        self._home = Home()
        #: Decides whether the answers of Postgres count.
        self.restored = Restored(parts)
        #: Reads the flushed state; and the flushed state together with the entries that wait in the ledger.
        self._reader, self._with_waiting = backing.reader, WithWaiting(parts, backing.reader, self.restored)
        self._remembered = backing.remembered
        self._waiter = waiter
        self._own_seq = own_seq
        self._recent: RecentStates[S] = RecentStates(_RECENT_BYTES)
        parts.log.on_forget(self._on_forget)
        #: Knows whether the store answers.
        self.store = StoreWatch(self._with_waiting, parts.config.read_timeout_s)
        #: Tells whether the Postgres of a read behind a flush is the flush's.
        self.same_postgres = SamePostgres(self._ledger, self.store, parts.config.read_timeout_s)
        #: Why the log refused a read, and until when that counts, in the loop's time.
        self._refused = ("", float("-inf"))
        #: When the log left a read unanswered last, and why, and until when such reads are tried again, in the loop's
        #: time.
        self._unanswered_at, self._unanswered, self._again_until = float("-inf"), "", 0.0

    @property
    def refused(self) -> str:
        """Why the log refused the last read, if that was not long ago; else empty."""
        why, until = self._refused
        return why if asyncio.get_running_loop().time() < until else ""

    @property
    def down(self) -> str | None:
        """Why the store counts as down; None while it answers."""
        return self.store.down

    async def aclose(self) -> None:
        """Stop checking whether the store is back."""
        await self.store.aclose()
        await self.same_postgres.aclose()
        await self.restored.aclose()

    def _on_forget(self, everything: bool) -> None:
        if everything:
            self._recent.forget_all()

    def _why_late(self, ours: bool, asked_store_alone: bool, began: float) -> str:
        """Return why a read ended late. `ours`: whether by our limit, and not by one of an app's own store."""
        if not ours:
            return ": the store's own call timed out"
        within = f" within {self._config.read_timeout_s:g} s"
        if self.store.down is not None:
            return f"{within}; the store counts as away: {self.store.down}"
        if asked_store_alone:
            return f"{within}: the store did not answer"
        return f"{within}: {self._unanswered}" if self._unanswered_at >= began else within

    async def thread(
        self,
        thread_id: str,
        level: Consistency,
        at_least: int = 0,
        quarantined: Quarantined = "raise",
        *,
        proven: bool = True,
    ) -> S:
        """Return the thread's state; the domain's empty one if the thread does not exist.

        `at_least`: a position that the state must include. `proven`: see `joined`.

        Raises ReadNotFresh when the level cannot be reached within `read_timeout_s`, StoreUnavailable when only
        Postgres could tell the state and does not answer, ThreadQuarantined.
        """
        self._home.check()
        read = partial(self._thread, thread_id, level, at_least, quarantined, proven=proven)
        return await while_awake(read, self._config.read_timeout_s)

    async def _thread(
        self, thread_id: str, level: Consistency, at_least: int, quarantined: Quarantined, *, proven: bool
    ) -> S:
        needed = max(at_least, self._own_seq(thread_id)) if level is not Consistency.EVENTUAL else at_least
        deadline = asyncio.get_running_loop().time() + self._config.read_timeout_s
        bound = asyncio.timeout_at(deadline)
        try:
            if level is Consistency.STRONG:
                # It ends by itself, and says why; a limit around it would end it without a word.
                flushed = await self._flushed(thread_id, deadline)
                needed = max(flushed, needed)
            async with bound:
                if level is Consistency.EVENTUAL:
                    state = await self._until(thread_id, lambda: self._reader.state(thread_id), needed)
                elif level is Consistency.STRONG:
                    state = await self.restored.counting(
                        lambda: self._until(thread_id, lambda: self._reader.state(thread_id), needed)
                    )
                else:
                    read = partial(self._joined_state, thread_id, proven)
                    look = partial(self._last, self._subjects.of(thread_id), proven)
                    state = await self._until(thread_id, lambda: self._riding_out(read, deadline, look), needed)
        except TimeoutError:
            # Of an eventual read that need not include anything, the store alone was asked.
            began = deadline - self._config.read_timeout_s
            why = self._why_late(bound.expired(), level is Consistency.EVENTUAL and not needed, began)
            raise ReadNotFresh(f"thread {thread_id!r} could not be read as {level.value}{why}") from None
        except (FlushTimeout, LogUnavailable, AppendUnknown) as e:
            raise ReadNotFresh(f"thread {thread_id!r} could not be read as {level.value}: {e}") from e
        except ConfigError as e:
            self._refused = str(e), asyncio.get_running_loop().time() + _REFUSED_FOR_S
            raise
        self._refused = "", float("-inf")
        broken_since = state.watermark.broken_since
        if broken_since is not None and level is not Consistency.EVENTUAL and quarantined == "raise":
            raise ThreadQuarantined(thread_id, broken_since)
        return state

    async def _flushed(self, thread_id: str, deadline: float) -> int:
        return await self.force_flush(thread_id, max(0.0, deadline - asyncio.get_running_loop().time()))

    async def _riding_out(
        self, read: Callable[[], Awaitable[T]], deadline: float, look: Callable[[], Awaitable[int]] | None = None
    ) -> T:
        """Return what `read` returns; try again for some time when the log does not answer: it may be a restart.

        `look`: an answer of the log that comes before each new try. In an outage that goes on this raises at once: an
        app can do without the log only if it knows.
        """
        loop, pause, again = asyncio.get_running_loop(), 0.02, False
        while True:
            try:
                if again and look is not None:  # a whole read would ask Postgres for the thread each time
                    await look()
                found = await read()
            except (LogUnavailable, AppendUnknown) as e:
                self._unanswered, again = str(e), True
                now = loop.time()
                if now - self._unanswered_at > _ONE_OUTAGE_S:
                    self._again_until = now + self._config.read_timeout_s / 2
                self._unanswered_at = now
                if now + pause >= min(self._again_until, deadline):
                    raise
            else:
                self._unanswered_at = float("-inf")
                return found
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.25)

    async def watermark(self, thread_id: str) -> Watermark:
        """Return the watermark that the thread has once its entries in the ledger are flushed.

        Raises StoreUnavailable, soon.
        """
        try:
            # The query reads one small row, however large the thread is. And the caller's earlier look at the log must
            # not grow old meanwhile: see `bufstore.buffer.append.tip_finder`.
            async with asyncio.timeout(STORE_PATIENCE_S):
                return await self._with_waiting.watermark(thread_id)
        except TimeoutError:
            raise StoreUnavailable("Postgres, which alone remembers this thread, does not answer") from None

    async def watermarks(self, thread_ids: Sequence[str]) -> dict[str, Watermark]:
        """Return the watermarks of many threads, with one query; threads that have none are left out.

        Entries that wait in the ledger (`Watermark.waits_to`) are not included. Raises StoreUnavailable.
        """
        if self.store.down is not None:
            raise StoreUnavailable(self.store.down)
        found = await self.restored.counting(lambda: self.store.while_up(self._ledger.watermarks(thread_ids)))
        return {t: row for t, (row, _) in found.items()}

    async def force_flush(self, thread_id: str, timeout_s: float) -> int:
        """Wait until everything of the thread that is acknowledged now is flushed; return the position of the last."""
        self._home.check()
        left_s = _left_of(timeout_s)
        last = await self._told(lambda s: self._log.latest(self._subjects.of(thread_id), s), thread_id, left_s())
        last = last or await self._asked(lambda: self._waits_to(thread_id), thread_id, left_s())
        if last:
            await self._waiter.thread(thread_id, last, left_s())
        return last

    async def force_flush_all(
        self, timeout_s: float, has_flushed: Callable[[Mapping[int, int]], bool] = lambda _: False
    ) -> None:
        """Wait until everything that is acknowledged now is flushed.

        `has_flushed`: whether Postgres need not be asked about these partitions, which end at these positions (0: there
        is no end above the log's floor).
        """
        self._home.check()
        left_s = _left_of(timeout_s)
        targets = dict(enumerate(await self._told(self._log.latest_partition_ends, None, left_s())))
        if has_flushed(targets):
            return
        if not all(targets.values()):
            passed = await self._asked(self._ledger.cursors, None, left_s())
            targets = {p: end or (passed[p].seq if p in passed else 0) for p, end in targets.items()}
        await self._waiter.partitions({p: seq for p, seq in targets.items() if seq}, left_s())
        await self._asked(lambda: self.restored.counts_since(self.restored.era), None, left_s())

    async def _waits_to(self, thread_id: str) -> int:
        return (await self.restored.counting(lambda: self._ledger.watermark(thread_id))).waits_to

    async def _told(self, ask: Callable[[float], Awaitable[T]], thread_id: str | None, timeout_s: float) -> T:
        """Return the log's answer. A silent log counts as unavailable only if it had as long as a read has."""
        own_s, late = self._config.read_timeout_s, "the log did not say in time which entries must be flushed"
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._riding_out(lambda: ask(max(timeout_s, own_s)), began + timeout_s)
        except TimeoutError:
            late += f": {self._unanswered}" if self._unanswered_at >= began else ""
            if timeout_s < own_s:
                raise FlushTimeout(thread_id, target=0, flushed=0, reason=late) from None
            raise LogUnavailable(late) from None

    async def _asked(self, ask: Callable[[], Awaitable[T]], thread_id: str | None, timeout_s: float) -> T:
        """Return the answer of Postgres, where entries may still wait that the log no longer shows."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._riding_out(ask, asyncio.get_running_loop().time() + timeout_s)
        except TimeoutError:
            reason = "Postgres did not say in time which entries wait" + (f": {self.down}" if self.down else "")
            raise FlushTimeout(thread_id, target=0, flushed=0, reason=reason) from None

    async def joined(self, thread_id: str, *, proven: bool = False) -> tuple[S, int]:
        """Return the thread's state with its tail, and the position of its last entry in the log (0: none there).

        `proven`: the state includes everything that was acknowledged to any caller before this call. Otherwise a leader
        that the other nodes have left may show the state of seconds ago. That is enough for a writer whose write holds
        only if the state is still the same.

        Raises StoreUnavailable when only Postgres could tell the state, and is down or does not answer within
        `read_timeout_s`; LogUnavailable.
        """
        kept = self._recent.get(thread_id, elapsed.now_s()) if self.store.down is None else None
        found = await self._continued(thread_id, kept, proven) if kept is not None else None
        if found is None:
            found = await self._from_store(thread_id, proven)
        self._recent.keep(thread_id, found)
        return found.state, found.last

    async def _continued(self, thread_id: str, kept: Kept[S], proven: bool) -> Kept[S] | None:
        """Return the kept state with all newer entries; None if the watermark does not confirm it: read it anew."""
        subject, began = self._subjects.of(thread_id), elapsed.now_s()
        row = spawn(self._with_waiting.watermark(thread_id))
        try:
            last = await self._last(subject, proven)
            new: list[Item] = []
            if last > kept.last:
                tail = await self._log.seen_after({subject: kept.last})
                new = items_of(tail[subject], thread_id)
            # If the store does not answer, leave it to `_from_store`, which knows how long to wait.
            await asyncio.wait([row], timeout=_ROW_S)
            if not row.done() or row.exception() is not None:
                return None
            if elapsed.now_s() - began > self._log.windows.rely_s / 2:
                return None  # after such a pause, entries that were written behind the row may have been purged
            found = kept.anchored(row.result(), links_of(new), last)
        finally:
            self.store.let_go(row)  # not awaited: on a hanging store it takes arbitrarily long to cancel a statement
        if found is None or not new:
            return found
        state = overlay(self._domain, kept.state, thread_id, new)
        return found._replace(state=state, size=self._size(state)) if not _broken(state) else None

    def _size(self, state: S) -> int:
        """Return about how many bytes the state takes if it is kept; 0: it must not be kept."""
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
                era = self.restored.era  # the era in which the store answered, and the answer counted
                last = await in_log
            except BaseException:
                self.store.let_go(asked)
                await end(in_log)
                raise
            if state is None:
                found = await self._without_store(thread_id, asked, deadline, last, proven)
            else:
                found = await self._with_tail(thread_id, state, era, last, proven)
            # During a long pause (of this process or machine, say) an entry may have left the log: then look again.
            if found is not None and elapsed.now_s() - began < self._log.windows.rely_s / 2:
                return found._replace(asked_at=began)

    async def _joined_state(self, thread_id: str, proven: bool) -> S:
        return (await self.joined(thread_id, proven=proven))[0]

    async def _with_tail(self, thread_id: str, state: S, era: int, last: int, proven: bool) -> Kept[S] | None:
        """Return `state` with the log's entries above it, at least up to `last`, if that is above it.

        None: Postgres, which answered in `era`, may have had less than it must have.
        """
        messages: list[StoredMessage] = []
        if last > state.watermark.flushed_seq:
            messages, last = await self._tail(thread_id, state.watermark.flushed_seq, last, proven)
        # This comes after the first look at the log, which may have set the log's floor.
        if not state.remembered and not await self.restored.counts_since(era):
            return None
        if not messages:
            return self._read(state, state, last, [])
        items = items_of(messages, thread_id)
        joined = overlay(self._domain, state, thread_id, items)
        if _broken(joined) and not _broken(state) and not state.remembered:
            # Either an entry is missing because Postgres has moved on since, or the chain is really broken.
            joined = overlay(self._domain, await self._with_waiting.state(thread_id), thread_id, items)
            return self._read(joined, joined, last, None)
        return self._read(joined, state, last, links_of(items))

    def _read(self, state: S, stored: S, last: int, behind: list[Link] | None) -> Kept[S]:
        """Return what was read. `stored`: the state without the tail. `behind`: the tail; None: do not keep this."""
        anchor = (stored.watermark.flushed_seq, stored.watermark.applied_id)
        known = behind is not None and stored.watermark.applied_id and not stored.watermark.waits_to
        return Kept(state, last, 0.0, anchor, behind or (), self._size(state) if known else 0)

    async def _without_store(
        self, thread_id: str, asked: asyncio.Task[S] | None, deadline: float, last: int, proven: bool
    ) -> Kept[S] | None:
        """Return the state from the log alone; if the log does not have it all, wait for the store after all.

        `asked`: the earlier request to the store; None: there was none.
        """
        try:
            messages, last = await self._tail(thread_id, 0, last, proven)
            state = from_log_alone(self._domain, thread_id, items_of(messages, thread_id))
            if state is not None:
                return self._read(state, state, last, None)
            stored = self._remembered(thread_id) if self._remembered is not None else None
            if stored is None:
                stored = await self.store.told_after_all(thread_id, asked, deadline)
        finally:
            self.store.let_go(asked)
        return await self._with_tail(thread_id, stored, self.restored.era, last, proven)

    async def _tail(self, thread_id: str, above: int, last: int, proven: bool) -> tuple[list[StoredMessage], int]:
        """Return the thread's messages in the log above a position, at least up to `last` if that is still there.

        The second value is the position of the thread's last message there, 0 for none.
        """
        subject = self._subjects.of(thread_id)
        pause = 0.001
        while last > above:
            # The look that found `last` has seen the log up to it, so this needs no further request for the log's end.
            messages = (await self._log.seen_after({subject: above}))[subject]
            if messages and messages[-1].seq >= last:
                return messages, messages[-1].seq
            # The entry at `last` has left the log since, or the server that answered lacked it. A state without it must
            # not be returned.
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.25)
            last = await self._last(subject, proven)
        return [], last

    async def _until(self, thread_id: str, read: Callable[[], Awaitable[S]], needed: int) -> S:
        """Read until the state includes position `needed`. The caller limits the time."""
        pause = 0.005
        while True:
            state = await read()
            flushed, waits = state.watermark.flushed_seq, state.watermark.waits_to
            if flushed >= needed or (not flushed and not waits and await self._gone(thread_id, needed)):
                return state
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.25)

    async def _gone(self, thread_id: str, needed: int) -> bool:
        """Return whether a thread without a watermark had position `needed`, and was deleted, purged and buried since.

        If the log has come that far and shows nothing of the thread, the thread's entries were purged, so they were
        committed long before.
        """
        subject = self._subjects.of(thread_id)
        if await self._last(subject, proven=False) or await self._log.end(self._config.read_timeout_s) < needed:
            return False
        return not await self._last(subject, proven=True)  # the answers so far may be from different nodes

    async def _last(self, subject: str, proven: bool) -> int:
        if proven:
            return await self._log.latest(subject, self._config.read_timeout_s)
        return (await self._log.ends([subject]))[0]


def _broken(state: State) -> bool:
    return state.watermark.broken_since is not None


def _left_of(timeout_s: float) -> Callable[[], float]:
    """Return a function that says how many of these seconds are left, counted from now."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + timeout_s
    return lambda: max(0.0, ends_at - loop.time())
