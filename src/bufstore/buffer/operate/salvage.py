"""Decides what can be saved from a log that no longer agrees with Postgres, without I/O.

Three things may have happened. The log lost its last entries: Postgres has applied more than the log shows. Postgres
went back further than the log reaches: entries in between are gone. Or both went on from a common past: entries
appended after the log went back stand at positions where Postgres has seen other entries.

Rule 1: positions prove nothing here, but ids do. Up to the last entry that Postgres has certainly applied
(`known_up_to`, over all threads of a partition, because a log is cut at one place) the log is the one that Postgres
knows.
Rule 2: an entry that may have been acknowledged and is not known to be applied is applied or parked, never dropped. A
snapshot at a position that Postgres has passed may be older than everything that a watermark remembers: it is applied
only if it builds on an entry that is known to be applied; otherwise it could rewind the thread.
Rule 3: a watermark whose memory is full has forgotten what was applied earlier. An entry that may be among that is
parked without a base, so that no replay rewinds the thread either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import msgspec

from bufstore.buffer import recent_keys
from bufstore.buffer.chain import Parked, Plan, Watermark, plan
from bufstore.buffer.entry import Entry, Item, StoredEntry

#: Why an entry is parked at a position that Postgres has passed, if it builds on nothing that Postgres knows.
_UNFOUNDED = "it may be older than what is applied"


def reason_to_repair(
    *,
    stream: str,
    log_epoch: int | None,
    epoch: int | None,
    log_start: int,
    log_first: int,
    log_end: int,
    applied: int,
    archived: int,
    made: bool,
) -> str | None:
    """Return why this log is not the one that Postgres knows, judged by their ends; None when they fit.

    `log_epoch` is None when there is no stream; `epoch` is None when Postgres knows of no epoch yet. `log_start`: the
    first position of the generation `log_epoch`, or of `epoch` if there is no stream. `applied`: the highest cursor.
    `archived`: an archive has everything below this position (of an existing log: see `lost_what_is_archived`).
    `made`: Postgres knows that the log of `epoch` has existed, whether anything of it was flushed or not.
    """
    if log_epoch is None:
        if applied >= log_start:
            return f"stream {stream} is gone, and Postgres has entries of its epoch {epoch or 0}"
        if archived > log_start:
            return f"stream {stream} is gone, and an archive has entries of its epoch {epoch or 0}"
        if made:
            return (
                f"stream {stream} is gone before anything of it was flushed, or this NATS is not the one that this "
                "database is used with"
            )
        return None
    if epoch is None:
        if log_first > log_start:
            return f"stream {stream} has been purged of entries that this Postgres never had: is it the right one?"
        return None
    if epoch > log_epoch:
        return f"stream {stream} has epoch {log_epoch}, Postgres knows epoch {epoch}: the stream is an older one"
    if epoch < log_epoch:
        return f"stream {stream} has epoch {log_epoch}, Postgres knows epoch {epoch}: Postgres is an older copy"
    if log_end < applied:
        return f"stream {stream} ends at {log_end}, but Postgres has applied entries up to {applied}"
    return None


def lost_what_is_archived(stream: str, log_end: int, archived: int) -> str | None:
    """Return why a log with this end has lost what an archive has, which has all below `archived`; None: it has not."""
    if log_end + 1 < archived:
        return f"stream {stream} ends at {log_end}, and an archive has it up to {archived - 1}"
    return None


def known_up_to(watermark: Watermark, items: Sequence[Item]) -> int:
    """Return the position of the last of a thread's `items` that Postgres has certainly applied; 0 if there is none."""
    return max((i.seq for i in items if isinstance(i, StoredEntry) and _applied(watermark, i.entry)), default=0)


def plan_salvage(
    watermark: Watermark,
    items: Sequence[Item],
    *,
    common: int,
    settled: Set[int],
    poison: Mapping[int, str] | None = None,
    among: Sequence[Item] | None = None,
) -> Plan:
    """Decide which of the log's entries of a thread take effect on `watermark`, and which are parked.

    `common`: the position up to which the log is the one that Postgres knows. `settled`: positions whose entries are in
    quarantine. `poison`: the ids of entries that turned out to be inapplicable, each with the cause. `among`: all
    entries that the log has of the thread, if `items` are only some of them; only all of them together tell which are
    applied, and which build on those.
    """
    # A thread's entries are settled in order, so all entries before an applied one are settled.
    among = items if among is None else among
    common = max(common, known_up_to(watermark, among))
    left = [i for i in among if i.seq not in settled and not _done(watermark, i, common)]
    decided = {i.seq for i in items}
    remaining = [i for i in left if i.seq in decided]
    if not remaining:
        return Plan(watermark=watermark)
    start = min(watermark.flushed_seq, min(i.seq for i in remaining) - 1)
    founded = _founded(watermark, among, common)
    unfounded = {i.seq: i.entry.id for i in left if isinstance(i, StoredEntry) and i.seq not in founded}
    behind = msgspec.structs.replace(watermark, flushed_seq=start)
    causes = dict.fromkeys(unfounded.values(), _UNFOUNDED) | dict(poison or {})
    found = plan(behind, remaining, complete=True, poison=causes)
    # In a healthy log an entry that came too late is superseded. Here it may be the thread's newest, so it is parked
    # and an operator decides.
    judged = {i.seq for i in found.apply} | {p.item.seq for p in found.park}
    doubtful = [i for i in remaining if i.seq not in judged and i.seq <= watermark.flushed_seq]
    after, park = found.watermark, list(found.park)
    for item in doubtful:
        # On the last one applied before it: a replay must not put it behind a later one.
        base = [watermark.applied_id, *(i.entry.id for i in found.apply if i.seq < item.seq)][-1]
        park.append(Parked(item, "written after the log had gone back", base))
        broken = after.broken_since if after.broken_since is not None else item.seq
        after = msgspec.structs.replace(after, broken_since=broken)
    after = msgspec.structs.replace(after, flushed_seq=max(watermark.flushed_seq, after.flushed_seq))
    if recent_keys.full(watermark.keys):
        park = [Parked(p.item, p.cause) if p.item.seq in unfounded else p for p in park]
    return Plan(watermark=after, apply=found.apply, park=sorted(park, key=lambda p: p.item.seq))


def _founded(watermark: Watermark, items: Sequence[Item], common: int) -> set[int]:
    """Return the positions of entries that are newer than all that was applied and is not remembered.

    They are behind all of it, or build on what is remembered, or on one of them, and are not remembered themselves.
    """
    founded, newer = set[int](), set[int]()
    for item in sorted((i for i in items if isinstance(i, StoredEntry)), key=lambda i: i.seq):
        e = item.entry
        if _done(watermark, item, common):
            # A key may have been used again: then another one stands before it in the memory.
            if recent_keys.holds_in_turn(watermark.keys, e.keys):
                newer.add(e.id)
        elif item.seq > watermark.flushed_seq or e.prev_id in newer or _known(watermark, e.prev_id):
            founded.add(item.seq)
            newer.add(e.id)
    return founded


def _known(watermark: Watermark, id_: int) -> bool:
    return id_ == watermark.applied_id or recent_keys.holds(
        watermark.keys, recent_keys.item(recent_keys.key_of(id_), b"")
    )


def _applied(watermark: Watermark, entry: Entry) -> bool:
    return _known(watermark, entry.id)


def _done(watermark: Watermark, item: Item, common: int) -> bool:
    """Return whether the entry is applied, superseded or parked as far as Postgres knows."""
    if item.seq > watermark.flushed_seq:
        return False
    if item.seq <= common:
        return True
    # The watermark may have the entry's idempotency key: then the same write took effect in an entry that the log lost.
    return isinstance(item, StoredEntry) and (
        _applied(watermark, item.entry) or recent_keys.holds(watermark.keys, recent_keys.newest(item.entry.keys))
    )
