"""Decides which flusher owns which partition: bounded rendezvous hashing over the live flushers.

Each flusher keeps one expiring record of itself in the shared state. For each partition, the members are ranked by a
hash of member and partition. The partition goes to the first member below the bound, which is the number of partitions
divided by the number of members, rounded up. So partitions are spread evenly, a change of members moves few of them,
and one write per flusher renews all its leases. Members need not agree at each moment: the term in Postgres fences an
owner (see `bufstore.buffer.flush.takeover`).

Source: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016), on rendezvous hashing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from hashlib import blake2b


class Pulse:
    """Decides which members are alive: those whose records one observer has lately seen renewed.

    The server removes a record that is not renewed, but late, because it looks once a second. And a server that was
    killed may have lost the record's expiry: then the record stays forever, and nobody would flush its member's
    partitions. Time in which the observer could not look does not count: the others could not renew either.
    """

    def __init__(self, ttl_s: float, interval_s: float) -> None:
        """`ttl_s`: a record's time to live. `interval_s`: between a live member's renewals, and the observer's looks.

        A member that cannot renew its record holds one interval before its end: others take its partitions then.
        """
        self._ttl_s, self._interval_s = ttl_s, interval_s
        #: The number of each record, and for how many seconds it has been the same.
        self._seen: dict[str, tuple[int, float]] = {}
        self._looked_at = float("-inf")

    def look(self, records: Mapping[str, int], now: float) -> tuple[list[str], list[str]]:
        """Return the members in `records` that are alive, and those that certainly are not."""
        more = min(now - self._looked_at, self._interval_s)
        self._looked_at = now
        age: dict[str, float] = {}
        for name, number in records.items():
            before, so_long = self._seen.get(name, (None, 0.0))
            age[name] = so_long + more if before == number else 0.0
        self._seen = {name: (records[name], age[name]) for name in records}
        holds_s = self._ttl_s - self._interval_s
        return [m for m in age if age[m] < holds_s], [m for m in age if age[m] > 2 * self._ttl_s]


def owners(members: Iterable[str], partitions: int) -> dict[int, str]:
    """Return the owner of each partition; an empty dict if there is no member."""
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
    """Return the partitions that `member` owns."""
    return frozenset(p for p, owner in owners(members, partitions).items() if owner == member)


def _weight(partition: int, member: str) -> bytes:
    return blake2b(f"{partition}/{member}".encode(), digest_size=8).digest()
