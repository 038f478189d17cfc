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
from bufstore.threads.payload import decode_payload


class RestoreCounts(Counts):
    """What became of threads and their entries."""

    threads: int = 0
    #: Entries that were applied (or written into the log), and entries that were already there.
    applied: int = 0
    present: int = 0
    #: Entries that cannot be applied. Nothing was done with them, nor with those behind them in their threads.
    refused: int = 0
    reasons: list[str] = msgspec.field(default_factory=list)


class Applicable(NamedTuple):
    """What takes effect, as one change, up to the first entry that cannot be applied."""

    plan: Plan
    change: Any
    refused: int
    reason: str


def applicable(thread_id: str, row: Watermark, version: int, items: Sequence[Item]) -> Applicable:
    """Which of `items` take effect on `row`; `version`: how many messages the store has of the thread."""
    poison: dict[int, str] = {}
    behind = [item for item in items if item.seq > row.flushed_seq]
    if behind and _builds_on_more(row, version, behind[0]):
        reason = _reason(thread_id, behind[0], "it builds on messages of before the log, which are not in Postgres")
        return Applicable(Plan(watermark=row), None, len(behind), reason)
    todo, change = decide_thread(thread_id, row, behind, poison, coalesce, complete=True)
    if not todo.park:
        return Applicable(todo, change, 0, "")
    # Only up to the first that cannot be applied: a restore sets nothing aside.
    first, cause = todo.park[0].item, todo.park[0].cause
    if not isinstance(first, Malformed):
        cause = poison.get(first.entry.id, cause)
    before = [item for item in behind if item.seq < first.seq]
    todo, change = decide_thread(thread_id, row, before, {}, coalesce, complete=True)
    return Applicable(todo, change, len(behind) - len(before), _reason(thread_id, first, cause))


def _builds_on_more(row: Watermark, version: int, first: Item) -> bool:
    """Whether the entry keeps messages that came into the store past the buffer, and are not there."""
    if row.flushed_seq or not isinstance(first, StoredEntry) or first.entry.base is not Base.NONE:
        return False
    try:
        return decode_payload(first.entry.payload).keep > version
    except ValueError:
        return False  # it is refused anyway, with its own reason


def _reason(thread_id: str, item: Item, cause: str) -> str:
    return f"thread {thread_id!r}, position {item.seq}: {cause}"
