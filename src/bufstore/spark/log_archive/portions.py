"""How much of an archive is restored at a time, so that memory is bounded; no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bufstore.buffer.entry import Item, StoredEntry

#: A portion is full with this many entries, or this many bytes of their payloads.
ENTRIES_MAX = 5000
BYTES_MAX = 32 << 20


class Portion(NamedTuple):
    """What is restored in one transaction: whole threads, or a part of one."""

    threads: dict[str, list[Item]]
    #: Whether an earlier portion holds the beginning of its thread.
    goes_on: bool = False


def portions(threads: Iterator[tuple[str, Iterator[Item]]], *, whole: bool) -> Iterator[Portion]:
    """Yield the threads' entries, each once, in order. `whole`: no thread is divided, however large it is."""
    together: dict[str, list[Item]] = {}
    count = size = 0
    for thread_id, items in threads:
        mine: list[Item] = []
        bytes_, divided = 0, False
        for item in items:
            mine.append(item)
            bytes_ += size_of(item)
            if not whole and (len(mine) >= ENTRIES_MAX or bytes_ >= BYTES_MAX):
                yield Portion({thread_id: mine}, divided)
                mine, bytes_, divided = [], 0, True
        if divided:
            if mine:
                yield Portion({thread_id: mine}, goes_on=True)
        elif mine:
            together[thread_id] = mine
            count, size = count + len(mine), size + bytes_
        if count >= ENTRIES_MAX or size >= BYTES_MAX:
            yield Portion(together)
            together, count, size = {}, 0, 0
    if together:
        yield Portion(together)


def size_of(item: Item) -> int:
    """Return the bytes of the item's payload."""
    if isinstance(item, StoredEntry):
        return len(item.entry.payload)
    return sum(len(message.body) for message in item.messages)
