"""Which of what has arrived is flushed next. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from bufstore.buffer.entry import Item
from bufstore.buffer.flush.deciding import Threads
from bufstore.buffer.flush.owned_partition import OwnedPartition


def gather(partitions: Iterable[OwnedPartition], wanted: Callable[[str | None], bool], room: int) -> Threads:
    """At most `room` entries of wanted threads, by thread; nothing behind entries that wait in the ledger.

    The partition whose first such entry is the oldest goes first. In any fixed order the last ones would wait for as
    long as there is a backlog: their feed would set them aside, and deliver all of it again
    (`bufstore.buffer.groups.delivery`).
    """
    ready: list[tuple[Item, Iterator[Item]]] = []
    for owned in partitions:
        entries = _wanted(owned, wanted)
        first = next(entries, None)
        if first is not None:
            ready.append((first, entries))
    ready.sort(key=lambda found: found[0].seq)
    threads: Threads = {}
    for item in islice(chain.from_iterable(chain([first], entries) for first, entries in ready), room):
        threads.setdefault(item.thread_id, []).append(item)
    return threads


def _wanted(owned: OwnedPartition, wanted: Callable[[str | None], bool]) -> Iterator[Item]:
    return (i for i in owned.pending.values() if i.thread_id not in owned.queues and wanted(i.thread_id))
