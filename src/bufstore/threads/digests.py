"""What a writer remembers of a thread's messages: a digest of each, to find what a new list has in common with them.

Content is compared, never identity or length of objects that the caller may have changed. A digest is Python's own
hash of the message's bytes (SipHash with a key of this process): 64 bits, never stored, never sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from bufstore.threads.model import encoded_id, id_of

_NOTHING: tuple[array[int], array[int]] = array("q"), array("q")


class MessageMemory(msgspec.Struct, gc=False, eq=False):
    """Digests of a thread's messages and of their ids, in order."""

    digests: array[int] = msgspec.field(default_factory=lambda: array("q"))
    ids: array[int] = msgspec.field(default_factory=lambda: array("q"))
    _known_ids: set[int] | None = None

    @property
    def weight(self) -> int:
        """About how many items it holds; one for the object itself."""
        return 1 + len(self.digests)

    def common(self, digests: array[int]) -> int:
        """How many leading messages a list with these digests shares with the remembered one."""
        shorter = min(len(digests), len(self.digests))
        if self.digests[:shorter] == digests[:shorter]:
            return shorter
        return next(i for i in range(shorter) if self.digests[i] != digests[i])

    def replace(self, keep: int, digests: array[int], ids: array[int]) -> tuple[array[int], array[int]]:
        """Put these behind the first `keep` messages. Returns what stood there: a second call with it is the undo."""
        removed = _NOTHING
        if keep < len(self.digests):
            removed = self.digests[keep:], self.ids[keep:]
            del self.digests[keep:], self.ids[keep:]
        self.digests.extend(digests)
        self.ids.extend(ids)
        if self._known_ids is not None:
            if removed is not _NOTHING:
                self._known_ids = None
            else:
                self._known_ids.update(ids)
        return removed

    def has_id(self, id_: int) -> bool:
        """Whether a message with this id digest is in the thread."""
        if self._known_ids is None:
            self._known_ids = set(self.ids)
        return id_ in self._known_ids


def digests_of(encoded: Iterable[bytes]) -> array[int]:
    """The digest of each encoded message."""
    return array("q", map(hash, encoded))


def ids_of(messages: Iterable[Any]) -> array[int]:
    """The digest of each message's ``id``; 0 for a message without a (str) id."""
    # Most messages have no id: a look at the dict spares them the call of `id_of`.
    return array("q", [_digest(id_of(m)) if type(m) is dict and "id" in m else 0 for m in messages])


def ids_of_encoded(encoded: Sequence[bytes]) -> array[int]:
    """Like `ids_of`, for encoded messages."""
    return array("q", (_digest(encoded_id(data)) for data in encoded))


def _digest(message_id: str | None) -> int:
    return 0 if message_id is None else hash(message_id) or 1
