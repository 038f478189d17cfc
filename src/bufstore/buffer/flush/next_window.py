"""Decides which of the entries that have arrived are flushed next. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from bufstore.buffer.entry import Item
from bufstore.buffer.flush.deciding import Threads
from bufstore.buffer.flush.owned_partition import OwnedPartition


def gather(partitions: Iterable[OwnedPartition], wanted: Callable[[str | None], bool], room: int) -> Threads:
    """Return at most `room` entries of wanted threads, by thread; none of a thread that has entries in the ledger.

    Each partition has an equal share of the room. Room that some leave unused goes to the partitions with the oldest
    entries. In any fixed order, even by age, some partitions would wait for as long as others have a backlog: their
    feed would set them aside, and deliver all of it again (`bufstore.buffer.groups.delivery`).
    """
    ready: list[tuple[Item, Iterator[Item]]] = []
    for owned in partitions:
        entries = _wanted(owned, wanted)
        first = next(entries, None)
        if first is not None:
            ready.append((first, entries))
    ready.sort(key=lambda found: found[0].seq)
    by_age = [chain([first], entries) for first, entries in ready]
    share = max(room // len(by_age), 1) if by_age else 0
    threads: Threads = {}
    for item in islice(chain((i for entries in by_age for i in islice(entries, share)), *by_age), room):
        threads.setdefault(item.thread_id, []).append(item)
    return threads


def _wanted(owned: OwnedPartition, wanted: Callable[[str | None], bool]) -> Iterator[Item]:
    return (i for i in owned.pending.values() if i.thread_id not in owned.queues and wanted(i.thread_id))
