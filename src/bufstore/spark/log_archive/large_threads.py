"""A thread that is too large for one portion: only all of it tells which of its entries were given up.

So this is decided before any of it is restored. Meanwhile the entries are in a file.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.buffer.entry import Item, Malformed, StoredEntry
from bufstore.spark.local_files import local_file
from bufstore.spark.log_archive.applicable import without_given_up

_encode = msgspec.msgpack.Encoder().encode
_entry = msgspec.msgpack.Decoder(StoredEntry).decode
_malformed = msgspec.msgpack.Decoder(Malformed).decode


def without_given_up_one_by_one(items: Iterator[Item]) -> Iterator[Item]:
    """Yield what `without_given_up` returns for these items, all that a thread has; few of them are in memory."""
    heads: list[Item] = []
    sizes: list[int] = []
    with local_file() as file:
        for item in items:
            sizes.append(file.write(_encode(item)))
            heads.append(_head(item))
        file.seek(0)
        for head, found, size in zip(heads, without_given_up(Watermark(), heads), sizes, strict=True):
            kept = file.read(size)
            if found is not head:
                yield found
            else:
                yield _entry(kept) if isinstance(head, StoredEntry) else _malformed(kept)


def _head(item: Item) -> Item:
    """Return what the decision needs of an item."""
    if isinstance(item, Malformed):
        return msgspec.structs.replace(item, messages=())
    entry = msgspec.structs.replace(item.entry, keys=b"", producers=None, payload=b"")
    return msgspec.structs.replace(item, entry=entry)
