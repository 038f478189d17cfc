"""Which of a thread's archived entries can be applied, and what a restore counts; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from bufstore.buffer.chain import Plan, Watermark
from bufstore.buffer.entry import Base, Item, Malformed, StoredEntry
from bufstore.buffer.flush.deciding import decide_thread
from bufstore.spark.task import Counts
from bufstore.threads.coalesce import coalesce
from bufstore.threads.payload import Removal, decode_payload


class RestoreCounts(Counts):
    """What became of threads and their entries."""

    threads: int = 0
    #: Entries that were applied (or written into the log), and entries that had been there already.
    applied: int = 0
    present: int = 0
    #: Entries that cannot be applied, as they would be parked, and those behind that build on them. Nothing was done
    #: with them.
    refused: int = 0
    reasons: list[str] = msgspec.field(default_factory=list)


class Applicable(NamedTuple):
    """The entries that take effect, as one change; those that a flush would park are refused."""

    plan: Plan
    change: Any
    refused: int
    reason: str


def applicable(thread_id: str, row: Watermark, version: int, items: Sequence[Item]) -> Applicable:
    """Return which of `items` take effect on `row`; `version`: how many messages the store has of the thread."""
    behind = _after_burials(without_given_up(row, [item for item in items if item.seq > row.flushed_seq]))
    if behind and _builds_on_more(row, version, behind[0]):
        cause = "it builds on messages that are older than the log and are not in Postgres"
        return Applicable(Plan(watermark=row), None, len(behind), _reason(thread_id, behind[0], cause))
    todo, change = decide_thread(thread_id, row, behind, {}, coalesce, complete=True)
    if not todo.park:
        return Applicable(todo, change, 0, "")
    # What a flush would park does nothing here: a restore parks nothing. What takes effect behind it does so all the
    # same, as it did then: a deletion, say, or a whole list.
    first, cause = todo.park[0].item, todo.park[0].cause
    last = todo.apply[-1].seq if todo.apply else 0
    before = [item for item in behind if item.seq < max(first.seq, last + 1)]
    parked = sum(parked.item.seq <= last for parked in todo.park)
    todo, change = decide_thread(thread_id, row, before, {}, coalesce, complete=True)
    since = todo.watermark.broken_since
    watermark = msgspec.structs.replace(todo.watermark, broken_since=since if since == row.broken_since else None)
    todo = msgspec.structs.replace(todo, watermark=watermark, park=())
    return Applicable(todo, change, parked + len(behind) - len(before), _reason(thread_id, first, cause))


def is_removal(item: Item) -> bool:
    """Return whether the entry deletes its thread."""
    if not isinstance(item, StoredEntry) or not item.entry.self_contained or item.entry.version:
        return False
    try:
        return isinstance(decode_payload(item.entry.payload), Removal)
    except ValueError:
        return False


def _after_burials(items: Sequence[Item]) -> list[Item]:
    """Return the entries; those that began a deleted thread anew are chained to its deletion, where they were not.

    Once the log has forgotten a deletion, its row goes, too (it is buried). A writer that then begins the thread anew
    finds nothing and expects nothing. A restore applies the deletion, which so has a row. (If Postgres has the deletion
    already, `plan` knows it.)
    """
    found: list[Item] = []
    deleted: tuple[int, int] | None = None
    for item in items:
        if isinstance(item, StoredEntry):
            entry = item.entry
            if deleted is not None and entry.base is Base.NONE:
                seq, id_ = deleted
                if entry.seen < seq:  # the entry came too late, and is passed over
                    found.append(item)
                    continue
                item = msgspec.structs.replace(
                    item, entry=msgspec.structs.replace(entry, base=Base.CHAINED, prev_id=id_)
                )
            deleted = (item.seq, entry.id) if is_removal(item) else None
        found.append(item)
    return found


def without_given_up(row: Watermark, items: Sequence[Item]) -> list[Item]:
    """Return the items; in place of entries that had no effect, because a later one builds on what is before them, a
    note that says so. Give all of a thread's items: those of a part may lack the later one.

    They were parked, for a constraint of Postgres, say, and discarded. The writer of the later entry knew them: it
    expected the last of them to be the thread's last in the log, or had seen the log to its end. (An archive may hold
    copies of an entry: a restore into the log writes entries again. A copy says nothing of what is before it.)
    """
    found, at = list(items), {row.applied_id: -1}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for n, item in enumerate(items):
        if isinstance(item, StoredEntry):
            first.setdefault(item.entry.id, n)
            last[item.entry.id] = n
    for n, item in enumerate(items):
        if not isinstance(item, StoredEntry):
            continue
        entry, base = item.entry, at.get(item.entry.prev_id, n)
        at[entry.id] = n
        if not entry.prev_id and n and isinstance(items[n - 1], Malformed):
            continue  # its writer could not read what it builds on
        if base >= n - 1 or not (
            entry.base is Base.CHAINED or (entry.base is Base.STORED and entry.seen >= items[n - 1].seq)
        ):
            continue
        cause = f"it was given up: the entry at {item.seq} builds on what is before it"
        for k in range(base + 1, n):
            other = items[k]
            if isinstance(other, StoredEntry) and base < first[other.entry.id] and last[other.entry.id] < n:
                found[k] = Malformed("", other.seq, (), cause, other.thread_id)
    return found


def _builds_on_more(row: Watermark, version: int, first: Item) -> bool:
    """Return whether the entry keeps messages that came into the store past the buffer, and are not there now."""
    if row.flushed_seq or not isinstance(first, StoredEntry) or first.entry.base is not Base.NONE:
        return False
    try:
        return decode_payload(first.entry.payload).keep > version
    except ValueError:
        return False  # the entry is refused anyway, with a reason of its own


def _reason(thread_id: str, item: Item, cause: str) -> str:
    return f"thread {thread_id!r}, position {item.seq}: {cause}"
