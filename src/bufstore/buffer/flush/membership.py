"""Which flusher owns which partition: rendezvous hashing with a bound over the live flushers.

Each flusher keeps one expiring record of itself in the shared state. For each partition the members are ranked by a
hash of both; the partition goes to the first member below the bound: the partitions divided by the members, rounded up.
So partitions are spread evenly, a change of members moves few of them, and one write per flusher renews all its leases.
Nothing depends on all members agreeing at each moment: the term in Postgres fences an owner (see
`bufstore.buffer.flush.takeover`).

Source: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016), on rendezvous hashing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from hashlib import blake2b


class Pulse:
    """Which members are alive: those whose record was renewed lately, as far as one observer has seen.

    The server removes a record that is not renewed. But a server that was killed may have lost the record's expiry: the
    record stays forever, and nobody would flush its member's partitions.
    """

    def __init__(self, ttl_s: float) -> None:
        """`ttl_s`: within this time a live member renews its record several times."""
        self._ttl_s = ttl_s
        #: The number of each record, and when it was first seen.
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, records: Mapping[str, int], now: float) -> tuple[list[str], list[str]]:
        """The members in `records` that are alive, and those that certainly are not."""
        self._seen = {
            name: self._seen[name] if self._seen.get(name, (None,))[0] == number else (number, now)
            for name, number in records.items()
        }
        age = {name: now - since for name, (_, since) in self._seen.items()}
        return [m for m in age if age[m] <= self._ttl_s], [m for m in age if age[m] > 2 * self._ttl_s]


def owners(members: Iterable[str], partitions: int) -> dict[int, str]:
    """The owner of each partition; nothing if there is no member."""
    members = list(members)
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


def owned(member: str, members: Iterable[str], partitions: int) -> frozenset[int]:
    """The partitions that `member` owns."""
    return frozenset(p for p, owner in owners(members, partitions).items() if owner == member)


def _weight(partition: int, member: str) -> bytes:
    return blake2b(f"{partition}/{member}".encode(), digest_size=8).digest()
