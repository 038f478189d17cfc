"""How much of an archive is restored at a time, so that memory is bounded; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from bufstore.buffer.entry import Item, bytes_of

#: A portion is full with this many entries, or this many bytes of their payloads.
ENTRIES_MAX = 5000
BYTES_MAX = 32 << 20


class Portion(NamedTuple):
    """What is restored in one transaction: whole threads, or a part of one."""

    threads: dict[str, list[Item]]
    #: Whether an earlier portion holds the beginning of its thread.
    goes_on: bool = False


def portions(
    threads: Iterator[tuple[str, Iterator[Item]]], judged: Callable[[Iterator[Item]], Iterator[Item]] | None
) -> Iterator[Portion]:
    """Yield the threads' entries, each once, in order. A thread that is too large for one portion is divided.

    `judged` decides about such a thread what only all of it tells (see `bufstore.spark.log_archive.large_threads`).
    None: no thread is divided, however large it is.
    """
    together: dict[str, list[Item]] = {}
    count = size = 0
    for thread_id, items in threads:
        mine, bytes_ = _first_of(items, whole=judged is None)
        if judged is not None and _full(len(mine), bytes_):
            yield from _divided(thread_id, judged(chain(mine, items)))
        elif mine:
            together[thread_id] = mine
            count, size = count + len(mine), size + bytes_
        if _full(count, size):
            yield Portion(together)
            together, count, size = {}, 0, 0
    if together:
        yield Portion(together)


def _divided(thread_id: str, items: Iterator[Item]) -> Iterator[Portion]:
    goes_on = False
    while mine := _first_of(items, whole=False)[0]:
        yield Portion({thread_id: mine}, goes_on)
        goes_on = True


def _first_of(items: Iterator[Item], *, whole: bool) -> tuple[list[Item], int]:
    """Take items until a portion is full, or (`whole`) all; return them and their bytes."""
    mine: list[Item] = []
    bytes_ = 0
    for item in items:
        mine.append(item)
        bytes_ += bytes_of(item)
        if not whole and _full(len(mine), bytes_):
            break
    return mine, bytes_


def _full(count: int, bytes_: int) -> bool:
    return count >= ENTRIES_MAX or bytes_ >= BYTES_MAX
