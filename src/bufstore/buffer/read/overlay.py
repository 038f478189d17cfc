"""Puts a thread's unflushed tail on its state, by the same decision and with the same change as a flush."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import Domain, S
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
    """
    for i, item in enumerate(items):
        if not isinstance(item, StoredEntry) or not item.entry.self_contained:
            continue
        start = domain.empty(thread_id, Watermark(applied_id=item.entry.prev_id))
        state = overlay(domain, start, thread_id, items[i:])
        if state.watermark.broken_since is not None:
            continue
        if item.entry.base is not Base.CHAINED:
            # If this entry does not count, its keys and numbers were never used, as the writer of the next entry has
            # made sure. So the last entry's keys and numbers are taken.
            last = items[-1].entry if items[-1] is not item and isinstance(items[-1], StoredEntry) else None
            keys, numbers = (last.keys, last.producers) if last is not None else (b"", None)
            watermark = msgspec.structs.replace(state.watermark, keys=keys, producers=numbers or b"")
            state = msgspec.structs.replace(state, watermark=watermark, unjudged=True)
        return msgspec.structs.replace(state, partial=item.entry.base is not Base.NONE)
    return None
