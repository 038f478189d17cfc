"""Finds a thread's tip: in the log, in Postgres, or from an earlier tip and what others have appended since."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from bufstore import elapsed
from bufstore.buffer import producers, recent_keys
from bufstore.buffer.append.lookups import Lookups
from bufstore.buffer.append.tip import (
    Tip,
    TipCache,
    tip_in_log,
    tip_of_judged,
    tip_of_message,
    tip_of_row,
    tip_unknown,
)
from bufstore.buffer.chain import Watermark, counts
from bufstore.buffer.domain import Inapplicable, M, S, S_co
from bufstore.buffer.entry import Base, Malformed, StoredEntry, items_of
from bufstore.buffer.flush.deciding import decide_thread
from bufstore.buffer.parts import Parts
from bufstore.log_lines import LogLines
from bufstore.tasks import end, spawn

_log = LogLines(__name__)

#: For how long a thread that was found nowhere counts as new. Purged entries were flushed a failover window ago, which
#: is longer: so a thread that was written to since still shows in the log.
_NEW_FOR_S = 5.0
#: How many threads that a read has found nowhere are remembered; those found longest ago are not written to in time.
_NEW_MAX = 10_000
#: How long Postgres is not asked about many threads again after it did not answer.
_KNOWN_AGAIN_S = 5.0

#: Which of these threads the store has.
Held = Callable[[Sequence[str]], Awaitable[Collection[str]]]

V = TypeVar("V")


class Stored(Protocol[S_co]):
    """What the store holds of threads: `bufstore.buffer.read.reads.Reads`."""

    @property
    def down(self) -> str | None:
        """Why the store counts as down; None while it answers."""

    async def joined(self, thread_id: str) -> tuple[S_co, int]:
        """The thread's state with its tail, and the position of its last entry in the log (0: none there).

        Raises StoreUnavailable when the store is needed and does not answer.
        """

    async def watermark(self, thread_id: str) -> Watermark:
        """The thread's watermark. Raises StoreUnavailable, soon."""

    def watermarks(self, thread_ids: Sequence[str]) -> Coroutine[Any, Any, Mapping[str, Watermark]]:
        """The rows of those threads that have one; entries that wait are not counted in. Raises StoreUnavailable."""


class TipFinder(Generic[S, M]):
    """Finds tips and remembers them in `tips`. Raises LogUnavailable; StoreUnavailable where Postgres is asked."""

    def __init__(self, parts: Parts[Any, S, M], stored: Stored[S], tips: TipCache[M], held: Held | None = None) -> None:
        """`held`: which of these threads the store has, if that can be asked."""
        self._log, self._subjects, self._domain = parts.log, parts.subjects, parts.domain
        self._timeout_s = parts.config.append_timeout_s
        self._stored = stored
        self._tips = tips
        self._last = Lookups(lambda subjects: self._log.last(subjects))
        self._nowhere = Lookups(self._found_nowhere)
        #: The tips of threads whose content need not be read: Postgres has it, or will once the log is flushed.
        self._judged = Lookups(lambda thread_ids: self._asked(self._judged_by_postgres, thread_ids))
        self._end = Lookups(self._found_end)
        self._held, self._ask_again_at = held, float("-inf")
        self._loop = asyncio.get_running_loop()
        self._seen = (0, float("-inf"))
        #: How long the machine had been suspended when `_seen_lately` last looked; `saw` does not renew this.
        self._suspended_s = elapsed.suspended_s()
        #: Threads that were found nowhere, when that look began, and the end of the log that was seen before it.
        self._new: dict[str, tuple[float, int]] = {}

    @property
    def _seen_for_s(self) -> float:
        """For how many seconds an end of the log, once seen, stays above everything that is purged."""
        return self._log.windows.rely_s / 4

    @property
    def _new_for_s(self) -> float:
        return min(_NEW_FOR_S, self._seen_for_s)

    def saw(self, seq: int, at: float) -> None:
        """Note that nothing in the log stood above `seq` at the loop's time `at`."""
        if seq > self._seen[0]:
            self._seen = seq, at

    def forget(self, thread_id: str) -> None:
        """Rely on nothing that was found out about the thread before."""
        self._tips.drop(thread_id)
        self._new.pop(thread_id, None)

    async def learn_new(self, thread_ids: Collection[str]) -> None:
        """Find out in a few requests which of many threads exist nowhere; finds none if the store cannot tell."""
        at, seen = elapsed.now_s(), await self._seen_lately()
        found = await self._exist_nowhere([t for t in thread_ids if self._tips.get(t) is None])
        self._new = dict.fromkeys(found, (at, seen))

    def found_nowhere(self, thread_id: str, at: float) -> None:
        """Note that a read which began at `at` (`bufstore.elapsed`) has found the thread nowhere.

        The thread's first write then need not look again, unless the end of the log was seen too long ago.
        """
        if not self._is_seen_lately() or self._tips.get(thread_id) is not None:
            return
        self._new[thread_id] = at, self._seen[0]
        if len(self._new) > _NEW_MAX:
            del self._new[next(iter(self._new))]

    def let_go(self) -> None:
        """Forget which threads were found nowhere: the log has begun anew."""
        self._new.clear()

    async def _exist_nowhere(self, thread_ids: Sequence[str]) -> dict[str, bool]:
        """Which of these threads neither log nor Postgres knows."""
        ends = await self._ends(thread_ids)
        # In this order: what has left the log is in Postgres.
        absent = [t for t, end in ends.items() if not end]
        rows = await self._stored.watermarks(absent) if absent else ()
        return dict.fromkeys(await self._not_held([t for t in absent if t not in rows]), True)

    async def _ends(self, thread_ids: Sequence[str]) -> dict[str, int]:
        ends = await self._log.ends([self._subjects.of(t) for t in thread_ids])
        return dict(zip(thread_ids, ends, strict=True))

    async def _not_held(self, thread_ids: Sequence[str]) -> list[str]:
        """Which of these threads the store does not have; none if it cannot tell."""
        if self._held is None or not thread_ids:
            return []
        held = await self._held(thread_ids)
        return [t for t in thread_ids if t not in held]

    def as_new(self, thread_id: str) -> Tip[M] | None:
        """The tip of a thread found nowhere, if that is too short ago for it to be written and purged; else None."""
        found = self._new.pop(thread_id, None)
        if found is None or elapsed.now_s() - found[0] > self._new_for_s:
            return None
        at, seen = found
        return tip_of_row(Watermark(), seen, at, self._domain.nothing())

    async def _found_nowhere(self, thread_ids: list[str]) -> dict[str, bool]:
        """Which of many threads neither log nor Postgres knows. A single one is not asked for: its content is read."""
        if len(thread_ids) == 1 or self._held is None:
            return {}
        return await self._asked(self._exist_nowhere, thread_ids)

    async def _judged_by_postgres(self, thread_ids: Sequence[str]) -> dict[str, Tip[M]]:
        at, seen = elapsed.now_s(), await self._seen_lately()
        ends = await self._ends(thread_ids)
        # Both at once: the first append to a thread waits for the answers.
        absent = spawn(self._not_held([thread_id for thread_id, end in ends.items() if not end]))
        rows = spawn(self._stored.watermarks(thread_ids))
        try:
            await asyncio.gather(absent, rows)
        finally:
            await end(absent, rows)
        marks = {t: rows.result().get(t, Watermark()) for t in thread_ids if t in rows.result() or ends[t]}
        tails = await self._with_tails({t: row for t, row in marks.items() if row.flushed_seq < ends[t]})
        found: dict[str, Tip[M]] = {}
        if elapsed.now_s() - at <= self._new_for_s:  # else entries before a tail may have been purged meanwhile
            new = (t for t in absent.result() if t not in marks)
            found = {t: tip_of_row(Watermark(), seen, at, self._domain.nothing()) for t in new}
            marks |= tails
            ends |= {t: max(ends[t], row.flushed_seq) for t, row in tails.items()}
        for thread_id, row in marks.items():
            tip: Tip[M] | None = tip_of_judged(row, ends[thread_id], seen, at)
            if tip is not None:
                found[thread_id] = tip
        return found

    async def _with_tails(self, rows: Mapping[str, Watermark]) -> dict[str, Watermark]:
        """The watermarks that these threads will have once their tails are flushed.

        A thread is left out if entries of it wait, its chain is broken, or not all of its tail will be applied.
        """
        whole = {t: row for t, row in rows.items() if not row.waits_to and row.broken_since is None}
        if not whole:
            return {}
        above = {self._subjects.of(t): row.flushed_seq for t, row in whole.items()}
        tails = await self._log.seen_after(above)
        found: dict[str, Watermark] = {}
        for thread_id, row in whole.items():
            items = items_of(tails[self._subjects.of(thread_id)], thread_id)
            plan, _ = decide_thread(thread_id, row, items, {}, self._domain.coalesce, complete=True)
            if not plan.park:
                found[thread_id] = plan.watermark
        return found

    async def _asked(
        self, look: Callable[[Sequence[str]], Awaitable[dict[str, V]]], thread_ids: Sequence[str]
    ) -> dict[str, V]:
        """Ask log and Postgres about many threads in a few requests; finds nothing while Postgres does not answer."""
        if self._loop.time() < self._ask_again_at:
            return {}
        try:
            # Wait for as long as the answer is of use: a request for each thread is far more work for slow servers.
            async with asyncio.timeout(self._new_for_s):
                return await look(thread_ids)
        except Exception as e:  # whatever it is, the request for each single thread, which follows, says it
            _log.debug("cannot ask about many threads: %s", type(e).__name__, extra={"action": "known_unavailable"})
            self._ask_again_at = self._loop.time() + _KNOWN_AGAIN_S
            return {}

    async def of_version(self, thread_id: str) -> Tip[M]:
        """The tip with the thread's version. The content is read only if log and watermarks do not tell the version."""
        tip = await self._judged.of(thread_id)
        if tip is None:
            return await self.of_content(thread_id)
        if tip.seq:
            self._tips.put(thread_id, tip)
        return tip

    async def look_up(self, thread_id: str) -> Tip[M]:
        """The tip from the log's last message of the thread. Postgres is not asked."""
        at, seen = elapsed.now_s(), await self._seen_lately()
        last = await self._last.of(self._subjects.of(thread_id))
        if last is None:
            return tip_unknown(seen, at)
        tip: Tip[M] = tip_of_message(last)
        self._tips.put(thread_id, tip)
        return tip

    async def of_content(self, thread_id: str) -> Tip[M]:
        """The tip with the thread's content, from Postgres and the tail."""
        at, seen = elapsed.now_s(), await self._seen_lately()
        if await self._nowhere.of(thread_id) and elapsed.now_s() - at <= self._new_for_s:
            return tip_of_row(Watermark(), seen, at, self._domain.nothing())
        state, seq = await self._stored.joined(thread_id)
        watermark, memory = state.watermark, self._domain.remember(state)
        if not seq:
            return tip_of_row(watermark, seen, at, memory)
        tip = tip_in_log(seq, watermark, memory)
        if not state.whole:
            tip.keys_complete, tip.producers = False, watermark.producers or None
        self._tips.put(thread_id, tip)
        return tip

    async def of_row(self, thread_id: str) -> Tip[M]:
        """The tip with all remembered keys and producers: those of its chain in the log, and those in Postgres."""
        at, seen = elapsed.now_s(), await self._seen_lately()
        watermark = await self._stored.watermark(thread_id)
        known = self._tips.get(thread_id)
        tip = await (self.confirm(thread_id, known) if known is not None else self.look_up(thread_id))
        if not tip.seq:
            return tip_of_row(watermark, seen, at, None)
        first = tip.first or await self._first_above(thread_id, watermark.flushed_seq)
        keys, marks = watermark.keys, watermark.producers
        if first is not None and counts(first, watermark, None):
            keys, marks = (
                recent_keys.merge(keys, first.entry.keys),
                producers.merge(marks, first.entry.producers or b""),
            )
        elif tip.first is not None:
            tip = tip_in_log(tip.seq, watermark, None)  # the log's last entry has no effect, or is parked
            self._tips.put(thread_id, tip)
            return tip
        tip.keys, tip.keys_complete, tip.first = recent_keys.merge(keys, tip.keys), True, None
        tip.producers = producers.merge(marks, tip.producers or b"")
        return tip

    async def _first_above(self, thread_id: str, seq: int) -> StoredEntry | None:
        """The log's first entry of the thread above a position: later entries may lack its keys."""
        found = await self._log.after(self._subjects.of(thread_id), seq, limit=1)
        return tip_of_message(found[0]).first if found else None

    async def confirm(self, thread_id: str, known: Tip[M]) -> Tip[M]:
        """The tip as it is now; `known` was the tip some time ago."""
        self._tips.drop(thread_id)
        if known.broken_since:
            return await self.of_content(thread_id)  # a replay heals a chain without writing an entry
        last = await self._last.of(self._subjects.of(thread_id))
        if last is not None and last.seq == known.seq:
            self._tips.put(thread_id, known)
            return known
        if last is not None and known.goes_on:
            return await self.catch_up(thread_id, known)
        return await self.look_up(thread_id)

    async def catch_up(self, thread_id: str, before: Tip[M]) -> Tip[M]:
        """The tip after the entries that others appended behind `before`, a tip that `goes_on`."""
        memory = before.memory
        subject = self._subjects.of(thread_id)
        messages = (await self._log.seen_after({subject: before.seq}))[subject]
        if not messages:
            # A conflict although nobody wrote behind our base: the base was purged, and maybe more with it.
            return await self.look_up(thread_id)
        tip, entries = before, list[StoredEntry]()
        for item in items_of(messages, thread_id):
            if isinstance(item, Malformed) or item.entry.prev_id != tip.id or item.entry.base is not Base.CHAINED:
                return tip_of_message(messages[-1])  # it is damaged, or our base was purged, and maybe more with it
            e = item.entry
            if memory is not None:
                try:
                    self._domain.observe(memory, item)
                except ValueError:  # a kind that this release does not know
                    return tip_of_message(messages[-1])
            entries.append(item)
            known = tip.producers if e.producers is None else e.producers
            tip = Tip(item.seq, e.id, Base.CHAINED, 0, e.version, e.keys, memory, 0, e.keys_complete, known)
        if memory is None:
            try:
                self._domain.coalesce(thread_id, before.version, entries)
            except Inapplicable:
                return tip_of_message(messages[-1])
        tip.judged = before.judged
        self._tips.put(thread_id, tip)
        return tip

    async def _found_end(self, _: list[str]) -> dict[str, int]:
        return {"": await self._log.end(self._timeout_s)}

    async def _seen_lately(self) -> int:
        """A position at or above everything that has been purged by now.

        Only entries committed a failover window ago are purged, so the log's end at any later moment is such a
        position.
        """
        if self._is_seen_lately():
            return self._seen[0]
        now, suspended_s = self._loop.time(), elapsed.suspended_s()
        seq = await self._end.of("") or 0
        self._suspended_s = suspended_s
        self._seen = max(self._seen, (seq, now)) if seq >= self._seen[0] else (seq, now)
        return seq

    def _is_seen_lately(self) -> bool:
        ago_s = self._loop.time() - self._seen[1] + elapsed.suspended_s() - self._suspended_s
        return ago_s <= self._seen_for_s
