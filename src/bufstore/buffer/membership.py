"""Who owns which partition: live flushers share them by rendezvous hashing with a bound.

Each flusher keeps one expiring record of itself in the hot state. For each partition the members are ranked by a hash
of both; it goes to the first who has not got his share yet: the partitions divided by the members, rounded up. So
shares are even, a change of members moves few partitions, and one write per flusher renews all its leases. Nothing
depends on everybody agreeing at each moment: what fences an owner is its term in Postgres (see
`bufstore.buffer.takeover`).

Source: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016), on rendezvous hashing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b


def owners(members: Sequence[str], partitions: int) -> dict[int, str]:
    """The owner of each partition; nothing if there is no member."""
    if not members:
        return {}
    share = -(-partitions // len(members))
    taken: Counter[str] = Counter()
    found = {}
    for partition in range(partitions):
        ranked = sorted(members, key=partial(_weight, partition))
        found[partition] = next(member for member in ranked if taken[member] < share)
        taken[found[partition]] += 1
    return found


def owned(member: str, members: Sequence[str], partitions: int) -> frozenset[int]:
    """The partitions that `member` owns."""
    return frozenset(p for p, owner in owners(members, partitions).items() if owner == member)


def _weight(partition: int, member: str) -> bytes:
    return blake2b(f"{partition}/{member}".encode(), digest_size=8).digest()
