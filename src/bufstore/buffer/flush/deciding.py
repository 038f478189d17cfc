"""Decisions of a flush, without I/O: what happens to a thread's entries, and how a window is divided."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence

import msgspec

from bufstore.buffer.chain import Plan, Watermark, plan
from bufstore.buffer.domain import Change, Coalesce, Inapplicable
from bufstore.buffer.entry import Item, StoredEntry

#: Entries to flush, by thread; None stands for entries whose thread is unknown.
Threads = MutableMapping[str | None, list[Item]]


def decide_thread(
    thread_id: str,
    watermark: Watermark,
    items: Sequence[Item],
    poison: MutableMapping[int, str],
    coalesce: Coalesce,
    *,
    complete: bool,
) -> tuple[Plan, Change | None]:
    """Return what happens to a thread's entries (see `chain.plan`), and the one change that equals the applied ones.

    Entries that turn out to be inapplicable are added to `poison`, with the cause.
    """
    while True:
        todo = plan(watermark, items, complete=complete, poison=poison)
        if todo.gap_before is not None or not todo.apply:
            return todo, None
        try:
            change = coalesce(thread_id, watermark.version, todo.apply)
        except Inapplicable as e:
            poison[e.entry_id] = str(e)
            continue
        return msgspec.structs.replace(
            todo, watermark=msgspec.structs.replace(todo.watermark, gone=change.gone)
        ), change


def by_partition(threads: Threads, partition_of: Callable[[str | None, Sequence[Item]], int]) -> list[Threads]:
    """Divide a window into one part per partition."""
    parts: dict[int, Threads] = {}
    for thread_id, items in threads.items():
        parts.setdefault(partition_of(thread_id, items), {})[thread_id] = items
    return list(parts.values())


def halves(threads: Threads) -> list[Threads]:
    """Divide the threads into two parts."""
    names = list(threads)
    return [{t: threads[t] for t in half} for half in (names[: len(names) // 2], names[len(names) // 2 :])]


def is_one_entry(threads: Threads) -> bool:
    """Return whether this is a single entry of a known thread, which can wait while the others go on."""
    return None not in threads and sum(map(len, threads.values())) == 1


def payload_bytes(threads: Threads) -> int:
    """Return how many bytes the payloads of these entries have."""
    return sum(len(i.entry.payload) for items in threads.values() for i in items if isinstance(i, StoredEntry))
