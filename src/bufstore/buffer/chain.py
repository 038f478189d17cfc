"""What may be applied: the rules of the chain, without I/O.

Rule 1: `plan` decides from a thread's row and entries alone; flush, overlay and writers all ask it, so that
a read shows exactly what a flush will make of the same entries.
Rule 2: order is the log's sequence. How entries were delivered (twice, late, in pieces) is no argument.

An entry takes effect when the row holds its predecessor. An entry that does not find it there waits for a *gap* to be
filled from the log; if the log has nothing more to offer the chain is broken, and a delta cannot be applied on any
base: it is parked. A self-contained entry starts the chain afresh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import msgspec

from bufstore.buffer import ring as rings
from bufstore.buffer import sources as sources_
from bufstore.buffer.entry import Base, Malformed, StoredEntry


class Row(msgspec.Struct, frozen=True):
    """What Postgres knows of a thread's chain; all of it changes in the flush transaction only."""

    #: The watermark's position: everything of the thread up to here is applied, superseded or parked. 0: no row.
    flushed_seq: int = 0
    #: The watermark's entry: the last one applied.
    applied_id: int = 0
    version: int = 0
    ring: bytes = b""
    #: The `thread_seq` of the first parked entry while the chain is broken.
    broken_since: int | None = None
    #: A tombstone: nothing of the thread is left but this row.
    gone: bool = False
    #: The highest numbers of the thread's sources.
    sources: bytes = b""


class Parked(msgspec.Struct, frozen=True):
    """An entry that is set aside, and why."""

    item: StoredEntry | Malformed
    cause: str
    #: The thread's last applied entry when this one was parked: as long as it still is, this one can be replayed.
    base_id: int | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with a thread's entries."""

    row: Row
    #: To be applied, in order.
    apply: Sequence[StoredEntry] = ()
    park: Sequence[Parked] = ()
    #: Set when entries between the row and this position are missing: fetch them and plan again.
    gap_before: int | None = None


def superseded(entry: StoredEntry, row: Row) -> bool:
    """Whether an entry that expected nothing in the log came too late.

    Such an expectation also holds after the thread's entries were purged, so a publish that was given up can land
    then. Purged means committed, and everything purged before the expectation was formed is at or below `seen`:
    if Postgres has got further, the thread has moved on and this entry must not rewind it.
    """
    e = entry.entry
    if e.base is Base.CHAINED:
        return False
    return row.flushed_seq > e.seen or (e.base is Base.NONE and row.flushed_seq > 0)


def counts(entry: StoredEntry, row: Row, behind: StoredEntry | Malformed | None) -> bool | None:
    """Whether an entry is stored, as its writer may be told: applied, to be applied, or in quarantine.

    False: a flush passes over it, or did. None: nothing tells any more. `row` was read before the log. `behind`: what
    follows the entry in the log. Keys tell of what is behind us: only what counts passes its key on, to the row and
    to the entries of those who know that it does (`bufstore.buffer.tip.tip_of_message`).
    """
    e = entry.entry
    if e.base is Base.CHAINED:
        return True
    if entry.seq > row.flushed_seq:
        return not superseded(entry, row)
    key = rings.newest(e.ring)
    if row.applied_id == e.id or row.broken_since == entry.seq or rings.holds(row.ring, key):
        return True
    if behind is None:
        return False
    return True if isinstance(behind, StoredEntry) and rings.holds(behind.entry.ring, key) else None


def plan(
    row: Row,
    items: Iterable[StoredEntry | Malformed],
    *,
    complete: bool,
    poison: Set[int] = frozenset(),
) -> Plan:
    """Decide what of a thread's `items` takes effect on `row`.

    `items` may come in any order and more than once. `complete`: nothing of the thread stands in the log between
    the row's watermark and the last item but these items, so that a missing predecessor will not turn up. `poison`:
    ids that are known not to be applicable; they are parked.
    """
    pending = sorted({item.seq: item for item in items if item.seq > row.flushed_seq}.items())
    apply: list[StoredEntry] = []
    park: list[Parked] = []
    skipped: set[int] = set()
    for seq, item in pending:
        broken = row.broken_since if row.broken_since is not None else seq
        if isinstance(item, Malformed):
            park.append(Parked(item, item.cause, row.applied_id))
            row = msgspec.structs.replace(row, flushed_seq=seq, broken_since=broken)
            continue
        e = item.entry
        if superseded(item, row):
            skipped.add(e.id)
            row = msgspec.structs.replace(row, flushed_seq=seq)
            continue
        chained = e.prev_id == row.applied_id or (e.base is Base.UNKNOWN)
        if not chained and not complete and e.prev_id not in skipped and row.broken_since is None:
            return Plan(row=row, apply=apply, park=park, gap_before=seq)
        if e.id in poison:
            park.append(Parked(item, "cannot be applied", row.applied_id))
            row = msgspec.structs.replace(row, flushed_seq=seq, broken_since=broken, sources=_sources(row, item))
            continue
        if not chained and not e.self_contained:
            park.append(Parked(item, "its predecessor is not applied", row.applied_id))
            row = msgspec.structs.replace(row, flushed_seq=seq, broken_since=broken, sources=_sources(row, item))
            continue
        apply.append(item)
        row = Row(
            flushed_seq=seq,
            applied_id=e.id,
            version=e.version,
            ring=rings.merge(row.ring, e.ring),
            broken_since=None if e.self_contained else row.broken_since,
            sources=_sources(row, item),
        )
    return Plan(row=row, apply=apply, park=park)


def _sources(row: Row, stored: StoredEntry) -> bytes:
    # Of a parked entry, too: its source has done its part, and the entry waits in quarantine.
    return sources_.merge(row.sources, stored.entry.sources or b"")
