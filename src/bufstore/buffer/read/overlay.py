"""Puts a thread's unflushed tail on its state, by the same decision and with the same change as a flush."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bufstore.buffer.chain import Watermark, plan
from bufstore.buffer.domain import Domain, Inapplicable, S
from bufstore.buffer.entry import Base, Item, StoredEntry


def overlay(domain: Domain[Any, S, Any], state: S, thread_id: str, items: Sequence[Item]) -> S:
    """Return `state` with `items` applied: all that the log has between its watermark and the last of them."""
    poison: set[int] = set()
    while True:
        todo = plan(state.watermark, items, complete=True, poison=frozenset(poison))
        if not todo.apply:
            return msgspec.structs.replace(state, watermark=todo.watermark)
        try:
            change = domain.coalesce(thread_id, state.watermark.version, todo.apply)
        except Inapplicable as e:
            poison.add(e.entry_id)
            continue
        return domain.overlay(state, thread_id, change, msgspec.structs.replace(todo.watermark, gone=change.gone))


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
