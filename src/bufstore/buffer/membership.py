"""Who owns which partition: live flushers share them by rendezvous hashing.

Each flusher keeps one expiring record of itself in the hot state; the owner of a partition is the live flusher
with the highest hash for it. So shares are even, a change of one member moves only its own partitions, and one
write per flusher renews all its leases. Nothing depends on everybody agreeing at each moment: what fences an owner is
its term in Postgres (see `bufstore.buffer.flusher`).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b


def owner(partition: int, members: Sequence[str]) -> str | None:
    """The member that owns `partition`; None if there is no member."""
    return max(members, key=lambda member: _weight(partition, member), default=None)


def owned(member: str, members: Sequence[str], partitions: int) -> frozenset[int]:
    """The partitions that `member` owns."""
    return frozenset(p for p in range(partitions) if owner(p, members) == member)


def _weight(partition: int, member: str) -> bytes:
    return blake2b(f"{partition}/{member}".encode(), digest_size=8).digest()
