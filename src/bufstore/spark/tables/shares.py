"""Which task reads which threads: ranges of a hash that Postgres and Python compute alike; decisions, without I/O.

Shares are not ranges of ids: new threads are in the log only, and their ids are often close together (they begin with
a date), so one task would hold the whole tail.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise

import msgspec

#: One above the highest hash.
HASHES = 1 << 32


def hash_of(thread_id: str) -> int:
    """Return the thread's hash, as `tables.sql` computes it."""
    return int.from_bytes(sha256(thread_id.encode()).digest()[:4])


class Share(msgspec.Struct, frozen=True):
    """The threads of one task: those whose hash is from `low` to below `high`."""

    low: int = 0
    high: int = HASHES

    def has(self, thread_id: str) -> bool:
        """Return whether the thread is one of them."""
        return self.low <= hash_of(thread_id) < self.high

    def divided(self, pieces: int) -> list[Share]:
        """Return the same threads as this many shares of the same size."""
        edges = [self.low + (self.high - self.low) * n // pieces for n in range(pieces + 1)]
        return [Share(low, high) for low, high in pairwise(edges)]

    def piece_of(self, thread_id: str, pieces: int) -> int:
        """Return which one of this many `divided` shares has the thread, which must be in this share."""
        return ((hash_of(thread_id) - self.low + 1) * pieces - 1) // (self.high - self.low)


#: The share of all threads.
ALL_THREADS = Share()
