"""The thread's memory of idempotency keys: the last 16, carried by every entry.

A writer that holds the compare-and-set sees a repeat among its predecessor's keys before it appends, in whatever
process the first attempt ran. An entry written without a key has its own id as key, so that a caller that got
OutcomeUnknown can retry with the id as key. Bound: a repeat is recognized among the thread's last 16 entries.
"""

from __future__ import annotations

from hashlib import blake2b

SIZE = 16
_ITEM = 12  # 8 bytes of key hash, 4 bytes of content hash


def item(key: str, content: bytes) -> bytes:
    """Return the item for a key and the content that it was used with (b"" when the content does not matter)."""
    return blake2b(key.encode(), digest_size=8).digest() + (
        blake2b(content, digest_size=4).digest() if content else b"\0\0\0\0"
    )


def item_of(id_: int) -> bytes:
    """Return the item of an entry that was written without a key: `item` of its `key_of`."""
    return blake2b(b"entry-%016x" % id_, digest_size=8).digest() + b"\0\0\0\0"


def key_of(id_: int) -> str:
    """Return the key of an entry that was written without one."""
    return f"entry-{id_:016x}"


def find(keys: bytes, wanted: bytes) -> bool | None:
    """Return True when the key was used with the same content, False with other content, None when it is not there."""
    for i in range(0, len(keys), _ITEM):
        if keys[i : i + 8] == wanted[:8]:
            known, given = keys[i + 8 : i + _ITEM], wanted[8:]
            return known == given or known == b"\0\0\0\0"
    return None


def holds(keys: bytes, wanted: bytes) -> bool:
    """Return whether `wanted` is one of the items."""
    return any(keys[i : i + _ITEM] == wanted for i in range(0, len(keys), _ITEM))


def holds_in_turn(keys: bytes, wanted: bytes) -> bool:
    """Return whether the last two of the items `wanted` are among the items, one behind the other."""
    pair = wanted[-2 * _ITEM :]
    return len(pair) == 2 * _ITEM and any(keys[i : i + 2 * _ITEM] == pair for i in range(0, len(keys), _ITEM))


def hash_of(item: bytes) -> bytes:
    """Return the hash of the item's key, without that of the content."""
    return item[:8]


def newest(keys: bytes) -> bytes:
    """Return the item of the entry that carries these keys."""
    return keys[-_ITEM:]


def add(keys: bytes, new: bytes) -> bytes:
    """Return the keys with `new` as the last item; the oldest is dropped when there are 16."""
    return (keys + new)[-SIZE * _ITEM :]


def full(keys: bytes) -> bool:
    """Return whether there is no room for an older item."""
    return len(keys) >= SIZE * _ITEM


def merge(older: bytes, newer: bytes) -> bytes:
    """Return the items of both; if not all fit, the newer ones are kept.

    An entry written without knowing the thread carries only its own key; the watermark's keys must outlive it.
    """
    if newer[:-_ITEM] == older[-(SIZE - 1) * _ITEM :]:
        return newer  # `newer` is `older` with one item added
    known = {newer[i : i + _ITEM] for i in range(0, len(newer), _ITEM)}
    rest = b"".join(older[i : i + _ITEM] for i in range(0, len(older), _ITEM) if older[i : i + _ITEM] not in known)
    return (rest + newer)[-SIZE * _ITEM :]
