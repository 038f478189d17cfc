"""The quarantine in memory, beside `MemoryLedger`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import msgspec

from bufstore.buffer.chain import Parked, Watermark
from bufstore.buffer.domain import Applies
from bufstore.buffer.entry import StoredEntry
from bufstore.buffer.flush.verdict import Verdict, verdict_of_app
from bufstore.buffer.operate.replay import Outcome, ParkedEntry
from bufstore.buffer.ports.ledger import FlushFailed, ParkedInfo, Replay
from bufstore.errors import Rejected, StoreUnavailable
from bufstore.tasks import own_cancels_only


async def apply_batch(target: Applies[Any], batch: Sequence[Any]) -> None:
    """Have the store write the batch. Raises FlushFailed."""
    try:
        if batch:
            with own_cancels_only():
                await target.apply(None, batch)
    except Rejected as e:
        raise FlushFailed(str(e), Verdict.POISON, cause=type(e).__name__) from e
    except (StoreUnavailable, FlushFailed):
        raise
    except Exception as e:  # the app's own code
        raise FlushFailed(f"the store's apply() raised {type(e).__name__}", verdict_of_app(e)) from e


class MemoryParked:
    """See `bufstore.buffer.ports.ledger.ParkedEntries`. Shares the rows of the threads with its ledger."""

    def __init__(self, watermarks: dict[str, Watermark], target: Applies[Any]) -> None:
        self._rows = watermarks
        self._target = target
        self.entries: dict[int, ParkedEntry] = {}
        #: By thread: the position up to which its entries were discarded.
        self.given_up: dict[str, int] = {}

    def park(self, parked: Sequence[Parked]) -> None:
        """Park entries, as part of a flush."""
        for p in parked:
            entry = ParkedEntry(
                seq=p.item.seq,
                thread_id=p.item.thread_id,
                base_id=p.base_id,
                cause=p.cause,
                parked_at=datetime.now(UTC),
                item=p.item,
            )
            self.entries.setdefault(p.item.seq, entry)

    async def page(self, after: int, thread_id: str | None, limit: int) -> list[ParkedInfo]:
        found = [e for e in self._sorted() if e.seq > after and thread_id in (None, e.thread_id)]
        return [self._info(e) for e in found[:limit]]

    async def entry(self, seq: int) -> ParkedEntry | None:
        return self.entries.get(seq)

    async def of_thread(self, thread_id: str, start: int) -> list[ParkedEntry]:
        return [e for e in self._sorted() if e.thread_id == thread_id and e.seq >= start]

    async def present(self, seqs: Sequence[int]) -> set[int]:
        return {seq for seq in seqs if seq in self.entries}

    async def threads(self, after: str, limit: int) -> list[str]:
        return sorted({e.thread_id for e in self.entries.values() if e.thread_id and e.thread_id > after})[:limit]

    async def ends(self) -> dict[str, int]:
        return {e.thread_id: e.seq for e in self._sorted() if e.thread_id is not None}

    async def replay(
        self, thread_id: str, start: int, decide: Callable[[Watermark, Sequence[ParkedEntry]], Replay]
    ) -> Replay:
        before = self._rows.get(thread_id, Watermark())
        replay = decide(before, await self.of_thread(thread_id, start))
        if replay.change is None:
            return replay
        await apply_batch(self._target, [replay.change])
        after = self._rows[thread_id] = replay.plan.watermark
        applied = [o.seq for o in replay.plan.outcomes if o.outcome is Outcome.APPLIED]
        for seq in applied:
            del self.entries[seq]
        for entry in self._sorted():
            if entry.thread_id == thread_id and entry.seq > applied[-1] and entry.base_id == before.applied_id:
                self.entries[entry.seq] = msgspec.structs.replace(entry, base_id=after.applied_id)
        self._mend(thread_id)
        return replay

    async def discard(self, seqs: Sequence[int]) -> int:
        gone = [self.entries.pop(s) for s in set(seqs) if s in self.entries]
        for e in gone:
            if e.thread_id is not None:
                self.given_up[e.thread_id] = max(e.seq, self.given_up.get(e.thread_id, 0))
                self._mend(e.thread_id)
        return len(gone)

    def _mend(self, thread_id: str) -> None:
        watermark = self._rows[thread_id]
        waiting = [e.seq for e in self._sorted() if e.thread_id == thread_id and e.base_id == watermark.applied_id]
        self._rows[thread_id] = msgspec.structs.replace(watermark, broken_since=waiting[0] if waiting else None)

    def _sorted(self) -> list[ParkedEntry]:
        return [self.entries[seq] for seq in sorted(self.entries)]

    def _info(self, entry: ParkedEntry) -> ParkedInfo:
        item = entry.item
        whole = msgspec.msgpack.encode(item if isinstance(item, StoredEntry) else item.messages)
        watermark = self._rows.get(entry.thread_id or "", Watermark())
        return ParkedInfo(
            seq=entry.seq,
            thread_id=entry.thread_id,
            entry_id=item.entry.id if isinstance(item, StoredEntry) else None,
            cause=entry.cause,
            bytes=len(whole),
            hash=sha256(whole).hexdigest(),
            parked_at=entry.parked_at,
            superseded=entry.thread_id is not None and entry.base_id != watermark.applied_id,
        )
