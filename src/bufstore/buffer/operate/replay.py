"""Decides which entries may be replayed from quarantine, without I/O.

An entry was parked on a base: the thread's last applied entry at that moment. As long as the watermark names the same
base, nothing was applied since, and the thread lacks exactly the parked entries: they are applied in the log's order,
as a flush would have done. Once the base has moved (a later snapshot healed the thread), the entry is superseded:
neither its messages nor its run may be written over newer ones, and nothing in it says which of two records of a run
is newer. A replay also moves the base of the entries that were parked behind those it applies.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from bufstore.buffer import recent_keys
from bufstore.buffer.chain import Watermark
from bufstore.buffer.entry import Item, Malformed, StoredEntry


class ParkedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry in quarantine, whole."""

    #: The entry's position in the log, which identifies it.
    seq: int
    #: None when even the subject names no thread.
    thread_id: str | None
    #: The id of the thread's last applied entry when this one was parked; None: the thread is unknown, or nothing tells
    #: whether this entry is applied already (`bufstore.buffer.operate.salvage`).
    base_id: int | None
    cause: str
    parked_at: datetime
    item: Item


class Outcome(enum.Enum):
    """What a replay did with an entry; the entry stays in quarantine unless it was APPLIED."""

    APPLIED = "applied"
    #: The thread has gone on without it.
    SUPERSEDED = "superseded"
    #: The entry that it builds on is not applied, or its thread cannot be changed now (its row may be held).
    WAITS = "waits"
    #: This release cannot read it.
    UNDECODABLE = "undecodable"
    #: The store still refuses it.
    REFUSED = "refused"


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay did with one entry, and why."""

    seq: int
    thread_id: str | None
    outcome: Outcome
    reason: str = ""


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with a thread's parked entries."""

    watermark: Watermark
    apply: Sequence[StoredEntry] = ()
    outcomes: Sequence[Replayed] = ()


def plan_replay(
    watermark: Watermark, parked: Sequence[ParkedEntry], *, refused: Mapping[int, str] | None = None
) -> ReplayPlan:
    """Decide which of a thread's `parked` entries take effect on `watermark`.

    `refused`: the ids of entries that turned out to be inapplicable, each with the reason.
    """
    base = watermark.applied_id
    refused = refused or {}
    apply: list[StoredEntry] = []
    outcomes: list[Replayed] = []
    for p in sorted(parked, key=lambda p: p.seq):
        outcome, reason = _judge(watermark, base, p, refused)
        outcomes.append(Replayed(seq=p.seq, thread_id=p.thread_id, outcome=outcome, reason=reason))
        if outcome is Outcome.APPLIED:
            assert isinstance(p.item, StoredEntry)
            e = p.item.entry
            apply.append(p.item)
            # The watermark's position stays: it has passed this entry, and maybe others, long ago.
            watermark = Watermark(
                flushed_seq=watermark.flushed_seq,
                applied_id=e.id,
                version=e.version,
                keys=recent_keys.merge(watermark.keys, e.keys),
                broken_since=watermark.broken_since,
                producers=watermark.producers,  # the row has had the entry's numbers since the entry was parked
            )
    return ReplayPlan(watermark=watermark, apply=apply, outcomes=outcomes)


def _judge(watermark: Watermark, base: int, parked: ParkedEntry, refused: Mapping[int, str]) -> tuple[Outcome, str]:
    item = parked.item
    if isinstance(item, Malformed):
        return Outcome.UNDECODABLE, item.cause
    if parked.base_id is None:
        return Outcome.SUPERSEDED, "nothing tells whether it is applied already"
    if parked.base_id != base:
        return Outcome.SUPERSEDED, "the thread has gone on without it"
    if item.entry.id in refused:
        return Outcome.REFUSED, refused[item.entry.id]
    if not item.entry.self_contained and item.entry.prev_id != watermark.applied_id:
        return Outcome.WAITS, "its predecessor is not applied"
    return Outcome.APPLIED, ""
