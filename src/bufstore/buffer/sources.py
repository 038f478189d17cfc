"""The highest number per named source: how a repeat of a source's write is known however much later it comes.

A pipeline that may do its work again (a Spark query, a consumer of a queue) numbers what it writes, growing per
thread: `bufstore.SourceMark`. Each entry carries, for up to 8 sources of its thread, the highest number that was
written; so a writer that holds the compare-and-set sees a repeat before it appends, in whatever process the first one
ran, without any window of time. The ring of keys (`bufstore.buffer.ring`) knows 16 writes; this knows all of a
source's, in 16 bytes. Why numbers: docs/adr/0014.

A ninth source of one thread makes the one be forgotten that has not written to the thread for the longest.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from bufstore.types import SourceMark

SIZE = 8
_ITEM = 16  # 8 bytes of the name's hash, 8 bytes of the number
NUMBER_MAX = (1 << 63) - 1


def item(name: str, number: int) -> bytes:
    """A source and its number."""
    return _hash_of(name) + number.to_bytes(8)


@lru_cache(maxsize=256)  # a process writes for few sources, and many numbers of each
def _hash_of(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=8).digest()


def item_of(mark: SourceMark | None) -> bytes | None:
    """The item of a mark; None of none."""
    return item(mark.name, mark.number) if mark is not None else None


def holds(sources: bytes, wanted: bytes) -> bool:
    """Whether the source has written this number already, or a higher one."""
    for i in range(0, len(sources), _ITEM):
        if sources[i : i + 8] == wanted[:8]:
            return sources[i + 8 : i + _ITEM] >= wanted[8:]  # big endian: compares as numbers do
    return False


def add(sources: bytes, new: bytes) -> bytes:
    """The sources after a write of `new`, which stands last; the first falls out when there are too many."""
    if sources[:8] == new[:8] and len(sources) == _ITEM:
        return new  # most threads have one source
    rest = b"".join(sources[i : i + _ITEM] for i in range(0, len(sources), _ITEM) if sources[i : i + 8] != new[:8])
    return (rest + new)[-SIZE * _ITEM :]


def merge(older: bytes, newer: bytes) -> bytes:
    """Both, each source with its highest number; those of `newer` are kept where there are more than fit."""
    if not newer or older == newer:
        return older
    merged = older
    for i in range(0, len(newer), _ITEM):
        one = newer[i : i + _ITEM]
        known = next((merged[k : k + _ITEM] for k in range(0, len(merged), _ITEM) if merged[k : k + 8] == one[:8]), one)
        merged = add(merged, max(known, one))
    return merged
