"""Decides which entries may be applied: the rules of the chain, without I/O.

Rule 1: `plan` decides from a thread's watermark and entries alone. Flush, overlay and writers all ask `plan`, so a read
shows exactly what a flush will make of the same entries.
Rule 2: the order of entries is the log's sequence. It does not matter how they were delivered (twice, late, in pieces).

An entry takes effect when the watermark names its predecessor. Otherwise the *gap* before it must first be filled from
the log. If the log does not have the missing entries, the chain is broken: a delta has no base to be applied on, and is
parked. A self-contained entry starts the chain afresh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from bufstore.buffer import producers, recent_keys
from bufstore.buffer.entry import Base, Item, Malformed, StoredEntry


class Watermark(msgspec.Struct, frozen=True):
    """What Postgres knows of a thread's chain. It changes only in the transaction of a flush or a replay."""

    #: The watermark's position: everything of the thread up to here is applied, superseded or parked. 0: no row.
    flushed_seq: int = 0
    #: The id of the watermark's entry, which is the last one that was applied.
    applied_id: int = 0
    version: int = 0
    keys: bytes = b""
    #: The `thread_seq` of the first parked entry while the chain is broken; None: the chain is not broken.
    broken_since: int | None = None
    #: True for a tombstone: only this row is left of the thread.
    gone: bool = False
    #: The highest sequence number of each of the thread's producers.
    producers: bytes = b""
    #: The position of the last of the thread's entries that wait in the ledger, behind `flushed_seq`; 0: none waits.
    #: Only watermarks that are read outside of a flush have it.
    waits_to: int = 0


class Parked(msgspec.Struct, frozen=True):
    """An entry that is set aside, and why."""

    item: Item
    cause: str
    #: The id of the thread's last applied entry when this entry was parked. This entry can be replayed for as long as
    #: that one is still the last applied; None: never.
    base_id: int | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with a thread's entries."""

    watermark: Watermark
    #: The entries to apply, in order.
    apply: Sequence[StoredEntry] = ()
    park: Sequence[Parked] = ()
    #: Set when entries between the watermark and this position are missing: fetch them and plan again. None: no gap.
    gap_before: int | None = None


def superseded(entry: StoredEntry, watermark: Watermark) -> bool:
    """Return whether an entry that expected nothing in the log came too late.

    Its expectation also holds after the thread's entries were purged, so a publish that the writer gave up can land
    then. Purged means committed, and everything that was purged before the writer looked is at or below `seen`. So if
    Postgres has got further, the thread has moved on and this entry must not rewind it.
    """
    e = entry.entry
    if e.base is Base.CHAINED:
        return False
    return watermark.flushed_seq > e.seen or (e.base is Base.NONE and watermark.flushed_seq > 0 and not watermark.gone)


def counts(entry: StoredEntry, watermark: Watermark, behind: Item | None) -> bool | None:
    """Return whether the writer may be told that its entry is stored: applied, to be applied, or in quarantine.

    False: a flush passes over the entry, or has done so. None: it can no longer be told. `watermark` was read before
    the log. `behind`: the item that follows the entry in the log. Keys are evidence: only an entry that counts passes
    its key on, to the watermark and to entries of writers that know it counts
    (`bufstore.buffer.append.tip.tip_of_message`).
    """
    e = entry.entry
    if e.base is Base.CHAINED:
        return True
    if entry.seq > watermark.flushed_seq:
        return not superseded(entry, watermark)
    key = recent_keys.newest(e.keys)
    if watermark.applied_id == e.id or watermark.broken_since == entry.seq or recent_keys.holds(watermark.keys, key):
        return True
    if behind is None:
        # In a chain that was broken when the writer looked, the entry may be parked: the row only tells of the first.
        return None if watermark.broken_since is not None and watermark.broken_since <= e.seen else False
    return True if isinstance(behind, StoredEntry) and recent_keys.holds(behind.entry.keys, key) else None


def plan(
    watermark: Watermark,
    items: Iterable[Item],
    *,
    complete: bool,
    poison: Mapping[int, str] | None = None,
) -> Plan:
    """Decide which of a thread's `items` take effect on `watermark`.

    `items` may come in any order and more than once. `complete`: the log has nothing of the thread between the
    watermark and the last item except these items, so a missing predecessor will not turn up. `poison`: the ids of
    entries that are known to be inapplicable, each with the cause; they are parked.
    """
    pending = sorted({item.seq: item for item in items if item.seq > watermark.flushed_seq}.items())
    apply: list[StoredEntry] = []
    park: list[Parked] = []
    skipped: set[int] = set()
    for seq, item in pending:
        broken = watermark.broken_since if watermark.broken_since is not None else seq
        if isinstance(item, Malformed):
            park.append(Parked(item, item.cause, watermark.applied_id))
            watermark = msgspec.structs.replace(watermark, flushed_seq=seq, broken_since=broken)
            continue
        e = item.entry
        if superseded(item, watermark):
            skipped.add(e.id)
            watermark = msgspec.structs.replace(watermark, flushed_seq=seq)
            continue
        # NONE on a tombstone: the writer found no tombstone because it was buried, but a Postgres that has failed over
        # has it again.
        anew = e.base is Base.UNKNOWN or (e.base is Base.NONE and watermark.gone)
        chained = anew or e.prev_id == watermark.applied_id
        if not chained and not complete and e.prev_id not in skipped and watermark.broken_since is None:
            return Plan(watermark=watermark, apply=apply, park=park, gap_before=seq)
        cause = poison.get(e.id) if poison else None
        if cause is None and not chained and not e.self_contained:
            cause = "its predecessor is not applied"
        if cause is not None:
            park.append(Parked(item, cause, watermark.applied_id))
            watermark = msgspec.structs.replace(
                watermark, flushed_seq=seq, broken_since=broken, producers=_producers(watermark, item)
            )
            continue
        apply.append(item)
        watermark = Watermark(
            flushed_seq=seq,
            applied_id=e.id,
            version=e.version,
            keys=recent_keys.merge(watermark.keys, e.keys),
            broken_since=None if e.self_contained else watermark.broken_since,
            producers=_producers(watermark, item),
        )
    return Plan(watermark=watermark, apply=apply, park=park)


def _producers(watermark: Watermark, stored: StoredEntry) -> bytes:
    # A parked entry counts too: its producer has done its part, and the entry waits in quarantine.
    return producers.merge(watermark.producers, stored.entry.producers or b"")
