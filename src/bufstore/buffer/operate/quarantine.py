"""The quarantine, for an operator: list its entries, replay them, discard them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import Coalesce, Inapplicable
from bufstore.buffer.entry import Malformed
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.operate.replay import Outcome, ParkedEntry, Replayed, plan_replay
from bufstore.buffer.parts import AnyParts
from bufstore.buffer.ports.ledger import FlushFailed, ParkedInfo, Replay
from bufstore.errors import BufstoreError, InvalidQuery, NotFound, StoreMisconfigured, StoreUnavailable
from bufstore.failpoints import Failpoint, reach
from bufstore.types import check_id

_PAGE = 500
_LIMIT_MAX = 100_000
#: No position of the log is above this one.
_POSITION_MAX = 2**63 - 1


def _whole(value: object, what: str) -> int:
    if type(value) is not int:
        raise InvalidQuery(f"{what} must be an int, not {value!r}")
    return value


def _limit(value: object) -> int:
    return max(1, min(_whole(value, "limit"), _LIMIT_MAX))


class Quarantine:
    """The entries that could not be applied; each is named by its position in the log (`thread_seq`).

    Every method raises InvalidQuery for what is no position or limit, StoreUnavailable when Postgres does not answer,
    StoreMisconfigured when it refuses.
    """

    def __init__(self, parts: AnyParts) -> None:
        self._ledger = parts.ledger
        self._coalesce = parts.domain.coalesce
        #: Tells every writer that a thread's chain is no longer the one that the writer remembers.
        self._tell = parts.shared.tell_parked

    async def count(self) -> int:
        """Return how many entries are in quarantine."""
        return await self._ledger.quarantined()

    async def page(self, *, thread_id: str | None = None, after: int = 0, limit: int = 100) -> Sequence[ParkedInfo]:
        """Return the entries (of one thread, if it is given) above position `after`, oldest first. Raises InvalidId."""
        if thread_id is not None:
            check_id(thread_id, "thread_id")
        after = min(max(_whole(after, "after"), 0), _POSITION_MAX)
        return await self._ledger.parked.page(after, thread_id, _limit(limit))

    async def show(self, seq: int) -> ParkedEntry:
        """Return one entry, whole. Raises NotFound."""
        found = await self._ledger.parked.entry(seq) if 0 <= _whole(seq, "seq") <= _POSITION_MAX else None
        if found is None:
            raise NotFound(f"quarantine has no entry with position {seq}; `bufstore quarantine list` shows what it has")
        return found

    async def replay(self, seq: int) -> Sequence[Replayed]:
        """Apply the entry and those of its thread parked behind it, in order, as far as possible.

        Returns what became of each. Each is applied exactly once, even beside a running flusher and when this call is
        repeated. Raises NotFound.
        """
        entry = await self.show(seq)
        if entry.thread_id is None:
            assert isinstance(entry.item, Malformed)
            reason = entry.item.cause
            return [Replayed(seq=seq, thread_id=None, outcome=Outcome.UNDECODABLE, reason=reason)]
        return await self._replay(entry.thread_id, seq)

    async def replay_thread(self, thread_id: str) -> Sequence[Replayed]:
        """Apply the thread's parked entries that are not superseded, in order. Returns what became of each.

        Raises InvalidId.
        """
        return await self._replay(check_id(thread_id, "thread_id"), 0)

    async def threads(self, *, after: str = "", limit: int = _PAGE) -> Sequence[str]:
        """Return the threads behind `after` that have entries here, in order of their ids. Raises InvalidId."""
        if after != "":
            check_id(after, "after")
        return await self._ledger.parked.threads(after, _limit(limit))

    async def discard(self, seqs: Sequence[int]) -> int:
        """Delete these entries for good. Returns how many there were.

        A thread that has no entries left in quarantine goes on from what Postgres holds.
        """
        if isinstance(seqs, (str, bytes)) or not isinstance(seqs, Iterable):
            raise InvalidQuery(f"seqs must be a list of positions, not {seqs!r}")
        seqs = [s for s in seqs if 0 <= _whole(s, "a position") <= _POSITION_MAX]
        threads = {e.thread_id for s in seqs if (e := await self._ledger.parked.entry(s)) is not None and e.thread_id}
        try:
            count = await self._ledger.parked.discard(seqs)
            reach(Failpoint.DISCARD_COMMITTED)
        finally:  # each position is a transaction of its own: after an error some are gone
            await self._tell_all(threads)
        return count

    async def _replay(self, thread_id: str, start: int) -> list[Replayed]:
        return [outcome async for outcomes in replaying(self, thread_id, start) for outcome in outcomes]

    async def _tell_all(self, threads: set[str]) -> None:
        for thread_id in threads:
            with contextlib.suppress(BufstoreError):  # writers also find out by a conflict or from Postgres
                await self._tell(thread_id)


async def replaying(quarantine: Quarantine, thread_id: str, start: int = 0) -> AsyncIterator[Sequence[Replayed]]:
    """Replay as `Quarantine.replay_thread`, from position `start` on; yield what became of each transaction's entries.

    So a caller knows what was applied before an error. Raises InvalidId.
    """
    check_id(thread_id, "thread_id")
    refused: dict[int, str] = {}
    single = applied = False
    try:
        while True:
            decide = _Decide(quarantine._coalesce, thread_id, refused, single=single)
            try:
                replay = await quarantine._ledger.parked.replay(thread_id, start, decide)
            except FlushFailed as e:
                if e.verdict.needs_operator:
                    raise StoreMisconfigured(str(e)) from e
                too_much = e.verdict is Verdict.SHRINK and not single
                if not (too_much or e.verdict in (Verdict.POISON, Verdict.SUSPECT)) or decide.last is None:
                    raise StoreUnavailable(str(e)) from e
                # Apply one entry at a time: less may be possible, or the one to blame is found. The entries that build
                # on that stay here.
                if single:
                    refused[decide.last] = str(e)
                single = True
                continue
            outcomes = replay.plan.outcomes
            if not outcomes:
                return
            applied = applied or any(o.outcome is Outcome.APPLIED for o in outcomes)
            yield outcomes
            start = outcomes[-1].seq + 1
    finally:
        if applied:
            reach(Failpoint.REPLAY_COMMITTED)
            await quarantine._tell_all({thread_id})


async def discard_superseded(quarantine: Quarantine, thread_id: str) -> int:
    """Discard what a deletion of the thread has superseded. Returns how many entries that were.

    What was written after the deletion is acknowledged, too, and was parked for a reason of its own.
    """
    count = after = 0
    while found := await quarantine.page(thread_id=thread_id, after=after, limit=_PAGE):
        after = found[-1].seq
        count += await quarantine.discard([entry.seq for entry in found if entry.superseded])
    return count


class _Decide:
    """Decides within a replay's transaction. `single`: apply at most one entry."""

    def __init__(self, coalesce: Coalesce, thread_id: str, refused: dict[int, str], *, single: bool) -> None:
        self._coalesce = coalesce
        self._thread_id = thread_id
        self._refused = refused
        self._single = single
        #: The id of the last entry that was to be applied; None: no entry was.
        self.last: int | None = None

    def __call__(self, watermark: Watermark, parked: Sequence[ParkedEntry]) -> Replay:
        while True:
            plan = plan_replay(watermark, parked, refused=self._refused)
            if self._single and len(plan.apply) > 1:
                parked = [p for p in parked if p.seq <= plan.apply[0].seq]
                continue
            self.last = plan.apply[-1].entry.id if plan.apply else None
            try:
                change = self._coalesce(self._thread_id, watermark.version, plan.apply) if plan.apply else None
            except Inapplicable as e:
                self._refused[e.entry_id] = str(e)
                continue
            if change is not None:
                after = msgspec.structs.replace(plan.watermark, gone=change.gone)
                plan = msgspec.structs.replace(plan, watermark=after)
            return Replay(plan=plan, change=change)
