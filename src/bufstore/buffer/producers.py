"""The highest sequence number per producer: a repeated write is recognized by it, however much later it comes.

A pipeline that may do its work again (a Spark query, a consumer of a queue) numbers its writes, growing per thread:
`bufstore.ProducerSequence`. Each entry carries, for up to 8 producers of its thread, the highest number that was
written. So a writer that holds the compare-and-set sees a repeat before it appends, in whatever process the first
write ran, without any window of time. `bufstore.buffer.recent_keys` knows the last 16 keys; this module knows all
writes of a producer, in 16 bytes. Why numbers: docs/adr/0014.

A ninth producer makes the thread forget the one that has not written to it for the longest time.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from bufstore.types import ProducerSequence

SIZE = 8
_ITEM = 16  # 8 bytes of the name's hash, 8 bytes of the number


def item(name: str, number: int) -> bytes:
    """Encode a producer and its sequence number."""
    return _hash_of(name) + number.to_bytes(8)


@lru_cache(maxsize=256)  # a process writes for few producers, and many numbers of each
def _hash_of(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=8).digest()


def item_of(mark: ProducerSequence | None) -> bytes | None:
    """Return the item of a mark; None without a mark."""
    return item(mark.producer_id, mark.sequence) if mark is not None else None


def holds(producers: bytes, wanted: bytes) -> bool:
    """Return whether the producer of `wanted` has already written its number or a higher one."""
    for i in range(0, len(producers), _ITEM):
        if producers[i : i + 8] == wanted[:8]:
            return producers[i + 8 : i + _ITEM] >= wanted[8:]  # big-endian bytes compare as the numbers do
    return False


def highest(producers: bytes, name: str) -> int:
    """Return the highest number that this producer has written; 0 if the thread remembers none."""
    for i in range(0, len(producers), _ITEM):
        if producers[i : i + 8] == _hash_of(name):
            return int.from_bytes(producers[i + 8 : i + _ITEM])
    return 0


def add(producers: bytes, new: bytes) -> bytes:
    """Return the producers after the write `new`, which goes last; the first is dropped when there are too many."""
    if producers[:8] == new[:8] and len(producers) == _ITEM:
        return new  # most threads have one producer
    rest = b"".join(
        producers[i : i + _ITEM] for i in range(0, len(producers), _ITEM) if producers[i : i + 8] != new[:8]
    )
    return (rest + new)[-SIZE * _ITEM :]


def merge(older: bytes, newer: bytes) -> bytes:
    """Return the producers of both, each with its highest number; if not all fit, those of `newer` are kept."""
    if not newer or older == newer:
        return older
    merged = older
    for i in range(0, len(newer), _ITEM):
        one = newer[i : i + _ITEM]
        known = next((merged[k : k + _ITEM] for k in range(0, len(merged), _ITEM) if merged[k : k + 8] == one[:8]), one)
        merged = add(merged, max(known, one))
    return merged
