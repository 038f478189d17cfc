"""The write path: writes to a thread become a unit, which goes into the next group of the log.

Theory of operation. The writer knows a thread's last entry, its *tip*, and a unit says that it is to follow that entry.
The group with the unit is stored only if it does: that one publish is order, compare-and-set and durability. Writes to
one thread queue in its *lane*; what queues while a unit is on its way goes out together in the next one.

Failure model. A unit ends as *stored*, *conflict* (another writer was first: nothing of it is stored), *not stored*, or
*unknown*. Unknown is always resolved before anything is rebuilt (`bufstore.buffer.append.lost_answer`): a conflict may
be with our own success.

Rule: an expectation of "nothing there" is never remembered (see `bufstore.buffer.chain.superseded`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, Generic

from tenacity import AsyncRetrying, retry_if_exception_type

from bufstore import elapsed
from bufstore.buffer import recent_keys
from bufstore.buffer.append.lane import Lane, Unit, Write
from bufstore.buffer.append.lost_answer import PAUSE, resolve
from bufstore.buffer.append.next_unit import Limits, Need, needs, next_unit, other_content
from bufstore.buffer.append.outstanding import Outstanding
from bufstore.buffer.append.refusals import Refusals
from bufstore.buffer.append.tip import Prepare, Tip, TipCache
from bufstore.buffer.append.tip_finder import Held, Stored, TipFinder
from bufstore.buffer.append.unresolved import Unresolved
from bufstore.buffer.domain import M, S
from bufstore.buffer.parts import Parts
from bufstore.errors import (
    BufstoreError,
    Closed,
    LogFull,
    LogUnavailable,
    OutcomeUnknown,
    StoreMisconfigured,
    StoreUnavailable,
)
from bufstore.failpoints import Failpoint, reach
from bufstore.home import Home
from bufstore.jetstream.messages import AppendUnknown, Conflict
from bufstore.log_lines import LogLines
from bufstore.tasks import end, interrupted, settle, spawn
from bufstore.types import Receipt

_log = LogLines(__name__)

#: Longest pause of a writer that others overtake again and again.
_PAUSE_MAX_S = 0.2

#: Looks up a thread's tip.
_Find = Callable[[], Awaitable[Tip[M]]]


class Appender(Generic[S, M]):
    """Appends entries; see the module's text. One per process and log."""

    def __init__(
        self,
        parts: Parts[Any, S, M],
        stored: Stored[S],
        explain: Callable[[LogFull], Awaitable[LogFull]] | None = None,
        held: Held | None = None,
    ) -> None:
        """`stored`: what the store holds of threads. `explain`: says more of a full log than the server does.

        `held`: see `TipFinder`.
        """
        log, config = parts.log, parts.config
        self._log, self._subjects, self._config = log, parts.subjects, config
        self._group = log.writer
        self._lanes: dict[str, Lane[M]] = {}
        self._tips: TipCache[M] = TipCache(config.cached_threads, 64 * config.cached_threads)
        self._unresolved = Unresolved(log, parts.subjects, stored.watermark)
        self._stored = stored
        self._finder = TipFinder(parts, stored, self._tips, held)
        self._tasks: set[asyncio.Task[None]] = set()
        self._outstanding: Outstanding[M] = Outstanding()
        self._closed = False
        #: The limits, with the server's as it was last known.
        self._limits = Limits(config.log.entry_bytes_max, 0)
        self._loop, self._home = asyncio.get_running_loop(), Home()
        #: The bound method, made once for all units.
        self._on_end = self._ended
        self._refusals = Refusals(explain)
        #: Grows when the log forgets who wrote to which thread.
        self._life = 0
        #: How often the log began anew, and forgot everything.
        self._anew = 0
        log.on_forget(self._let_go)
        # Seeded once by the system, which is not asked for each id: ids must not collide, and need not be secret.
        self._bits = random.Random().getrandbits  # noqa: S311
        self.appended = 0
        self.conflicts = 0

    def start(self) -> None:
        """Begin to send."""
        self._group.start()

    async def aclose(self) -> None:
        """Refuse new writes, wait for those on their way (bounded by their own deadlines), stop."""
        self._closed = True
        await self._outstanding.ended(self._config.append_timeout_s)
        await self._group.aclose()
        await end(*self._tasks)
        self._outstanding.close()
        reach(Failpoint.CLOSE_DRAINED)

    def tip(self, thread_id: str) -> Tip[M] | None:
        """The thread's last entry if this process wrote or saw it lately."""
        return self._tips.get(thread_id)

    def forget(self, thread_id: str) -> None:
        """Look the thread up again before its next write, also when one is on its way."""
        lane = self._lanes.get(thread_id)
        if lane is not None:
            lane.stale = True
        self._finder.forget(thread_id)

    def _let_go(self, everything: bool) -> None:
        self._life += 1
        self._anew += everything
        if everything:
            self._finder.let_go()
        for thread_id, tip in self._tips.all():
            head = self._log.known_head(self._subjects.of(thread_id))
            if everything or (head and head != tip.seq):
                self._tips.drop(thread_id)
        for thread_id, lane in self._lanes.items():
            lane.forgotten = max(lane.forgotten, self._log.known_head(self._subjects.of(thread_id)))

    def found_nowhere(self, thread_id: str, at: float) -> None:
        """See `TipFinder.found_nowhere`."""
        self._finder.found_nowhere(thread_id, at)

    async def learn_new(self, thread_ids: Collection[str]) -> None:
        """See `TipFinder.learn_new`."""
        self._home.check()
        await self._finder.learn_new(thread_ids)

    async def append(
        self,
        thread_id: str,
        prepare: Prepare[M],
        *,
        key: str | None = None,
        content: bytes = b"",
        mark: bytes | None = None,
    ) -> Receipt:
        """Append the entry that `prepare` makes of the thread's tip. Returns its receipt once the entry is durable.

        `prepare` is called again when another writer was faster. `key` and `content`: an idempotency key, and
        what it stands for. `mark`: an item of `bufstore.buffer.producers`. Raises what `prepare` raises, and the errors
        of `ThreadRunStore.checkpoint`.
        """
        self._home.check()
        if self._closed:
            raise Closed("the store is closed")
        id_ = self._bits(63) or 1
        item = recent_keys.item_of(id_) if key is None else recent_keys.item(key, content)
        deadline = self._loop.time() + self._config.append_timeout_s
        write = Write(prepare, item, key is not None, mark, id_, self._loop.create_future(), deadline)
        if write.keyed and (thread_id, write.item) in self._unresolved:
            found = await self._find_unresolved(thread_id, key or "", write)
            if found is not None:
                return found
        self._enter(thread_id, [write])
        try:
            return await write.done
        except asyncio.CancelledError:
            self._gave_up(thread_id, write)
            raise
        except (TimeoutError, AppendUnknown) as e:
            error = self._without_answer(thread_id, key, write, e)
            self._gave_up(thread_id, write)
            raise error from None
        except LogFull as e:
            raise await self._refusals.explained(e, self.appended) from None
        finally:
            self._outstanding.leave(write)

    async def append_series(
        self, thread_id: str, wanted: Sequence[tuple[Prepare[M], bytes | None]]
    ) -> tuple[list[Receipt], Exception | None]:
        """Append entries in order, each (`prepare`, `mark`) as `append` does; stop at the first that fails.

        Returns the receipts of the stored entries, and the error of the first that is not stored. Nothing behind it was
        tried; but after OutcomeUnknown some entries behind it may be stored too. The entries go out in common units, so
        a series takes about one round trip to the log.
        """
        self._home.check()
        if self._closed:
            raise Closed("the store is closed")
        deadline = self._loop.time() + self._config.append_timeout_s
        writes: list[Write[M]] = []
        last: Write[M] | None = None
        for prepare, mark in wanted:
            id_ = self._bits(63) or 1
            last = Write(
                prepare, recent_keys.item_of(id_), False, mark, id_, self._loop.create_future(), deadline, last
            )
            writes.append(last)
        if last is None:
            return [], None
        self._enter(thread_id, [*writes])
        try:
            await asyncio.wait((last.done,))  # then all have ended: they end in order
        finally:
            for write in writes:
                self._outstanding.leave(write)
                write.done.cancel()
                if write.failed:
                    self._gave_up(thread_id, write)
        receipts: list[Receipt] = []
        error: BaseException | None = None
        for write in writes:
            found = write.done.exception()  # of each, or asyncio reports an exception that was never retrieved
            if found is None:
                receipts.append(write.done.result())
            elif isinstance(found, (TimeoutError, AppendUnknown)):
                error = error or self._without_answer(thread_id, None, write, found)
            else:
                error = error or found
        assert error is None or isinstance(error, Exception)
        if isinstance(error, LogFull):
            error = await self._refusals.explained(error, self.appended)
        return receipts, error

    @property
    def refused(self) -> str:
        """Why the log refused the last write, if that was not long ago; else empty."""
        return self._refusals.lately(self.appended)

    def _enter(self, thread_id: str, writes: list[Write[M]]) -> None:
        """Queue writes. The list may become the lane's queue: nobody else may have it."""
        for write in writes:
            self._outstanding.enter(write)
        lane = self._lanes.get(thread_id)
        if lane is None:
            lane = self._lanes[thread_id] = Lane(thread_id, writes)
            self._advance(lane)
        else:
            lane.queue.extend(writes)

    def _gave_up(self, thread_id: str, write: Write[M]) -> None:
        """Let go of a write whose caller has gone, unless it may be stored: it would be kept until NATS is back."""
        lane = self._lanes.get(thread_id)
        if lane is not None and not lane.drop(write) and write.maybe_behind is None:
            self._group.gave_up()

    def _without_answer(self, thread_id: str, key: str | None, write: Write[M], error: BaseException) -> BufstoreError:
        """The error for a caller whose time is over, or whose answer was lost."""
        behind = write.maybe_behind
        if behind is None and isinstance(error, TimeoutError) and (thread_id, write.item) not in self._unresolved:
            lane = self._lanes.get(thread_id)
            if not self._log.trouble and lane is not None and lane.asks_store:
                if (down := self._stored.down) is not None:
                    return StoreUnavailable(
                        f"only Postgres knows thread {thread_id!r}: {down}; nothing was stored; retry"
                    )
                why = "the log or Postgres is slow"
                return LogUnavailable(f"thread {thread_id!r} was not found in time: {why}; nothing was stored; retry")
            why = f": {self._log.trouble}" if self._log.trouble else ""
            return LogUnavailable(f"the log accepted no entry in time{why}; nothing was stored; retry")
        if behind is not None:
            self._unresolved.remember(thread_id, write.item, behind)
        return OutcomeUnknown(thread_id, key if key is not None else recent_keys.key_of(write.id))

    async def _find_unresolved(self, thread_id: str, key: str, write: Write[M]) -> Receipt | None:
        """The receipt of an earlier try with this key; None if it is not stored, so that only this one can be.

        Waits while the log is away, or Postgres when only Postgres can tell: a caller that repeats a call until its
        outcome is known must not spin. Raises OutcomeUnknown; at once, and with the reason, if no wait will tell.
        """
        found = None
        try:
            async with asyncio.timeout_at(write.deadline):
                async for attempt in AsyncRetrying(
                    wait=PAUSE, retry=retry_if_exception_type((LogUnavailable, StoreMisconfigured, StoreUnavailable))
                ):
                    with attempt:
                        found = await self._unresolved.find(thread_id, write.item)
        except (TimeoutError, AppendUnknown) as e:
            raise OutcomeUnknown(thread_id, key) from (e if isinstance(e, AppendUnknown) else None)
        if found is None:
            return None
        entry, same = found
        if not same:
            raise other_content(thread_id)
        return Receipt(thread_id, entry.seq, entry.entry.id, entry.entry.version, repeated=True)

    # --- the lane: one unit of a thread at a time ---------------------------------------------------------

    def _advance(self, lane: Lane[M], tip: Tip[M] | None = None, *, looked_up: int = 0) -> None:
        """Send what is queued if the tip is known; otherwise look it up first.

        `looked_up`: how many of the queued writes had come when this tip was read: their refusals may rest on it.
        """
        thread_id, queue = lane.thread_id, lane.queue
        while queue and queue[0].done.done():
            del queue[0]
            looked_up -= 1
        if not queue:
            self._lanes.pop(thread_id, None)
            return
        # A remembered tip was found before these writes came: a refusal must not rest on it.
        tip = tip or self._tips.get(thread_id) or self._finder.as_new(thread_id)
        if tip is None:
            # Only once this process has looked at the log: its first look forgets everything, and `_find` would have to
            # search once more.
            if self._life and (need := needs(queue[0])) is not None:
                lane.asks_store = True
                self._spawn(lane, self._find(lane, self._search(need, thread_id, None), head=queue[0]))
            else:
                self._spawn(lane, self._find(lane, partial(self._finder.look_up, thread_id)))
            return
        if self._limits.unit_bytes_max != (unit_bytes_max := self._log.unit_bytes_max):
            self._limits = Limits(self._config.log.entry_bytes_max, unit_bytes_max)
        try:
            taken = next_unit(thread_id, self._subjects.of(thread_id), queue, tip, self._limits, looked_up)
            unit = lane.take(taken, tip, self._on_end)
        except Exception as e:  # no memory left, say; if nobody drives the lane, every later write waits in it for ever
            _log.exception("cannot build an entry; nothing is stored", extra={"action": "build_error"})
            self._fail(lane, LogUnavailable(f"cannot build the entry ({type(e).__name__}); nothing was stored; retry"))
            return
        if taken.needs is not None:
            lane.asks_store = taken.needs is not Need.TIP
            self._spawn(lane, self._find(lane, self._search(taken.needs, thread_id, tip), head=queue[0]))
        elif unit is None:
            self._advance(lane)
        else:
            unit.drafted_at, unit.drafted_in = self._loop.time(), self._anew
            self._group.add(unit)

    def _search(self, need: Need, thread_id: str, tip: Tip[M] | None) -> _Find[M]:
        match need:
            case Need.TIP:
                assert tip is not None, "what is refused was refused because of one"
                return partial(self._finder.confirm, thread_id, tip)
            case Need.VERSION:
                return partial(self._finder.of_version, thread_id)
            case Need.BASE:
                return partial(self._finder.of_content, thread_id)
            case Need.ROW:
                return partial(self._finder.of_row, thread_id)

    def _ended(self, unit: Unit[M], outcome: int | Exception) -> None:
        if not isinstance(outcome, int):
            self._spawn(unit.lane, self._recover_or_fail(unit, outcome), unit.writes)
            return
        lane, seq = unit.lane, outcome
        reach(Failpoint.RECEIPT_BEFORE)
        unit.after.seq = seq
        lane.conflicts = 0
        # As of the drafting, not of now: the answer may have waited for this process while it was stopped.
        self._finder.saw(seq, unit.drafted_at)
        # The expectation of "nothing there" may have been met because entries were purged meanwhile.
        late = not unit.before.seq and elapsed.now_s() - unit.before.asked_at > self._log.windows.rely_s / 2
        if lane.stale or late:
            lane.stale = False
            self._tips.drop(lane.thread_id)
        else:
            self._tips.put(lane.thread_id, unit.after)
        for write in reversed(unit.writes):
            if late:
                settle(write.done, AppendUnknown("the answer came too late to be relied on"))
            else:
                settle(write.done, Receipt(lane.thread_id, seq, write.id, write.draft.version))
            seq -= 1  # the unit's entries are neighbours in one group
        self.appended += len(unit.writes)
        if lane.queue:
            self._advance(lane)
        else:
            self._lanes.pop(lane.thread_id, None)

    # --- what is rare: lookups, conflicts, lost answers ---------------------------------------------------

    def _spawn(self, lane: Lane[M], work: Awaitable[None], writes: Sequence[Write[M]] = ()) -> None:
        """Do some work that drives a lane. `writes`: those of which nobody else tells how they ended."""
        task = spawn(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._worked, lane, writes))

    def _worked(self, lane: Lane[M], writes: Sequence[Write[M]], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if interrupted(task) or (task.cancelled() and not self._closed):  # perhaps before it began
            what = "the task that writes was cancelled or interrupted"
            for write in writes:
                settle(write.done, AppendUnknown(what))
            self._fail(lane, LogUnavailable(f"{what}; nothing was stored"))

    async def _find(self, lane: Lane[M], find: _Find[M], *, head: Write[M] | None = None, now: bool = True) -> None:
        """Find a tip, trying again while the log is away and somebody still waits; then go on.

        `head`: the only write that needs what is looked for, and the only one that fails without it; None: all do.
        `now`: the tip found is that of now. False: it is that of a conflict, and queued writes may have come since.
        """
        try:
            while True:
                anew, lane.asking, lane.forgotten, lane.stale = self._anew, len(lane.queue), 0, False
                try:
                    tip = await find()
                except (LogUnavailable, AppendUnknown):
                    lane.asks_store = False  # or not only
                    tip = await self._find_again(lane, find)
                if lane.stale:  # `forget` came meanwhile: trust neither what was found nor what the look began with
                    self._tips.drop(lane.thread_id)
                    find = partial(self._finder.look_up, lane.thread_id)
                elif anew == self._anew and max(tip.seq, tip.seen) >= lane.forgotten:
                    break
        except (BufstoreError, AppendUnknown) as e:
            self._fail(lane, e, head)
        except Exception as e:
            _log.exception("cannot look up a thread; nothing is stored", extra={"action": "lookup_error"})
            self._fail(
                lane, LogUnavailable(f"cannot look up the thread ({type(e).__name__}); nothing was stored"), head
            )
        else:
            lane.asks_store = False
            self._advance(lane, tip, looked_up=lane.asking if now else 0)

    async def _find_again(self, lane: Lane[M], find: _Find[M]) -> Tip[M]:
        async for attempt in AsyncRetrying(
            wait=PAUSE,
            retry=retry_if_exception_type((LogUnavailable, AppendUnknown)),
            stop=lambda _: all(w.done.done() for w in lane.queue),
            reraise=True,
        ):
            with attempt:
                return await find()
        raise AssertionError("tenacity ended without an outcome")

    def _fail(self, lane: Lane[M], error: Exception, head: Write[M] | None = None) -> None:
        """End this write, if it still waits in the lane; None: all that do."""
        lane.asks_store = False
        self._tips.drop(lane.thread_id)
        self._refusals.look(error, self.appended)
        failed = lane.queue[:] if head is None else [head]
        for write in failed:
            lane.drop(write)
            settle(write.done, error)
        self._advance(lane)

    async def _recover_or_fail(self, unit: Unit[M], error: Exception) -> None:
        try:
            await self._recover(unit, error)
        except Exception as e:
            # If nobody drives the lane, every later write of the thread runs into its deadline.
            _log.exception("cannot recover a write; its outcome is unknown", extra={"action": "recover_error"})
            for write in unit.writes:
                settle(write.done, AppendUnknown(f"unexpected {type(e).__name__}"))
            lost = LogUnavailable(f"cannot recover a write of the thread ({type(e).__name__}); nothing was stored")
            self._fail(unit.lane, lost)

    async def _recover(self, unit: Unit[M], error: Exception) -> None:
        """Go on after a unit that was not stored, or may not have been."""
        lane, before = unit.lane, unit.before
        if isinstance(error, AppendUnknown):
            unit.sent()  # it may have been
            outcome = await resolve(unit, self._log, self._group, lambda: self._anew == unit.drafted_in)
            if outcome is None:  # every caller has given up
                unit.undo()
                self._tips.drop(lane.thread_id)
                self._advance(lane)
                return
            if isinstance(outcome, int):
                self._ended(unit, outcome)
                return
            error = outcome
        unit.undo()
        unit.refused()
        self._tips.drop(lane.thread_id)
        if isinstance(error, (Conflict, LogUnavailable)):
            overtaken = isinstance(error, Conflict)
            self.conflicts += overtaken
            lane.conflicts = lane.conflicts + 1 if overtaken else 0
            if lane.conflicts > 3:  # others are faster: let them
                await asyncio.sleep(min(0.001 * 2 ** (lane.conflicts - 3), _PAUSE_MAX_S))
            lane.queue[:0] = [write for write in unit.writes if not write.done.done()]
            if not lane.queue:  # nobody waits: look nothing up
                self._advance(lane)
                return
            if overtaken and before.seq and before.goes_on and not lane.stale:
                await self._find(lane, partial(self._finder.catch_up, lane.thread_id, before), now=False)
                return
            if not overtaken:
                await asyncio.sleep(0.05)
            await self._find(lane, partial(self._finder.look_up, lane.thread_id))
            return
        self._refusals.look(error, self.appended)
        for write in unit.writes:
            settle(write.done, error)
        self._advance(lane)
