"""Puts a thread's unflushed tail on top of its state, by the same decision and with the same change as a flush."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bufstore.buffer.chain import Watermark, superseded
from bufstore.buffer.domain import Change, Domain, Inapplicable, S
from bufstore.buffer.entry import Base, Item, StoredEntry
from bufstore.buffer.flush.deciding import decide_thread


def overlay(domain: Domain[Any, S, Any], state: S, thread_id: str, items: Sequence[Item]) -> S:
    """Return `state` with `items` applied: all that the log has between its watermark and the last of them."""
    plan, change = decide_thread(thread_id, state.watermark, items, {}, domain.coalesce, complete=True)
    if change is None:
        return msgspec.structs.replace(state, watermark=plan.watermark)
    return domain.overlay(state, thread_id, change, plan.watermark)


def from_log_alone(domain: Domain[Any, S, Any], thread_id: str, items: Sequence[Item]) -> S | None:
    """Return the thread as the log knows it, without the store; None if the log does not know all of its content.

    Flushed entries stay in the log for a while, so the log often holds all of a thread's content: from any
    self-contained entry on, if everything behind that entry is chained.

    What was parked before an entry that replaces the content looks the same as what was applied; that entry has ended
    the thread's quarantine. So a change of something else (an edit that made the thread) is no beginning before one.
    """
    starts = [i for i, item in enumerate(items) if isinstance(item, StoredEntry) and item.entry.self_contained]
    for i in starts:
        item = items[i]
        assert isinstance(item, StoredEntry)
        start = domain.empty(thread_id, Watermark(applied_id=item.entry.prev_id))
        state = overlay(domain, start, thread_id, items[i:])
        if state.watermark.broken_since is not None or not _chained(items[i:]):
            continue
        later = (_change(domain, thread_id, items[j]) for j in starts if j > i)
        if any(change is not None and change.whole for change in later):
            change = _change(domain, thread_id, item)
            if change is None or not (change.whole or change.gone):
                continue
        if item.entry.base is not Base.CHAINED:
            # If this entry does not count, its keys and numbers were never used, as the writer of the next entry has
            # made sure. So the last entry's keys and numbers are taken.
            last = items[-1]
            assert isinstance(last, StoredEntry)
            keys, numbers = (last.entry.keys, last.entry.producers) if last is not item else (b"", None)
            watermark = msgspec.structs.replace(state.watermark, keys=keys, producers=numbers or b"")
            state = msgspec.structs.replace(state, watermark=watermark, unjudged=True)
        return msgspec.structs.replace(state, partial=item.entry.base is not Base.NONE)
    return None


def _change(domain: Domain[Any, Any, Any], thread_id: str, item: Item) -> Change | None:
    """Return what the entry changes; None if it cannot be applied."""
    assert isinstance(item, StoredEntry)
    try:
        change: Change = domain.coalesce(thread_id, 0, [item])
    except Inapplicable:
        return None
    return change


def _chained(items: Sequence[Item]) -> bool:
    """Return whether each entry builds on the one before it.

    If one does not, those that it skips had no effect: they were parked, and an operator has discarded them, or a whole
    list has ended the thread's quarantine. What of the entries before was parked, too, only the store knows.
    """
    last: int | None = None
    seq = 0
    for item in items:
        if not isinstance(item, StoredEntry):
            return False
        if not superseded(item, Watermark(flushed_seq=seq)):
            if last not in (None, item.entry.prev_id):
                return False
            last = item.entry.id
        seq = item.seq
    return True
