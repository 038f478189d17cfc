"""What a process knows of the groups in the log: the last entry of each thread, and up to where that is complete.

The head of each thread with entries above the *floor* is known, up to the last group that was seen. Below the floor,
everything is in Postgres for good (`bufstore.buffer.flush.passed`), so nobody needs to be shown it. Groups
are observed in the order of the log and without a gap: each names the one before it.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

from bufstore.buffer.groups.group import Group
from bufstore.buffer.places import first_place, group_of, last_place

#: How many generations of heads there are at most. Heads are forgotten by generations, so none is looked at for that.
_GENERATIONS_MAX = 8
#: A process that remembers fewer entries and heads than this need not ask how many of them may be forgotten.
_LITTLE = 1000


class Gap(Exception):
    """A group names another predecessor than the last that was seen: groups are missing, or the log went back."""

    def __init__(self, group: Group, seen: int) -> None:
        super().__init__(f"group {group.seq} follows group {group.before}, but the last group seen is {seen}")
        self.group = group


class _Entries:
    """The places of one partition's entries that were seen above the floor, in order."""

    __slots__ = ("_dropped", "bytes", "places", "sizes")

    def __init__(self) -> None:
        self.places = array("q")
        #: About how many bytes were seen in the partition, and how many up to each of these entries.
        self.bytes = 0.0
        self.sizes = array("d")
        self._dropped = 0.0

    def above(self, position: int) -> tuple[int, float]:
        """How many entries stand above this position, and about how many bytes they take."""
        first = bisect_right(self.places, position)
        return len(self.places) - first, self.bytes - (self.sizes[first - 1] if first else self._dropped)

    def drop(self, below: int) -> None:
        """Forget the entries below this place."""
        if first := bisect_left(self.places, below):
            self._dropped = self.sizes[first - 1]
            del self.places[:first], self.sizes[:first]


class Heads:
    """The heads of threads; see the module's text."""

    def __init__(self) -> None:
        #: The place below which everything may be forgotten.
        self.floor = 0
        #: The place below which everything may be purged, as groups say.
        self.purged = 0
        #: Sequence and id of the last group seen; 0 for none.
        self.seen = 0
        self.seen_id = 0
        self._anywhere = False
        #: Grows with each `start`: what was checked in an earlier life must be checked anew.
        self.life = 0
        #: The generations of heads, the newest last, and the place behind each.
        self._generations: list[dict[bytes, int]] = [{}]
        self._tops: list[int] = [0]
        #: By partition, the entries that were seen above the floor.
        self._entries: defaultdict[int, _Entries] = defaultdict(_Entries)
        #: How many entries that is.
        self.entries = 0
        #: How many entries were seen at all; those that are seen again after `start` count again.
        self.entries_seen = 0
        #: The group behind which everything was seen.
        self.began = 0
        #: The groups that name parts of large entries, each with the first of its parts.
        self._named: deque[tuple[int, int]] = deque()

    def start(self, floor: int, seen: int, seen_id: int | None) -> None:
        """Begin anew: everything up to the group `seen` lies below the place `floor`.

        `seen_id` is None when it is not known whether there is a group with this sequence, and which.
        """
        self.floor, self.seen, self.seen_id = floor, seen, seen_id or 0
        self.purged = 0
        self._anywhere = seen_id is None
        self.life += 1
        self._generations, self._tops = [{}], [0]
        self._entries.clear()
        self.entries = 0
        self.began = seen
        self._named.clear()

    def observe(self, group: Group, size: int = 0) -> bool:
        """Note the next group, of about `size` bytes. Returns False if it was seen before. Raises Gap."""
        if group.seq <= self.seen:
            return False
        follows = (group.before, group.before_id) == (self.seen, self.seen_id)
        if not follows and not (self._anywhere and group.before <= self.seen):
            raise Gap(group, self.seen)
        self._passed(group.seq, group.id)
        self.purged = max(self.purged, group.purged)
        newest, entries = self._generations[-1], self._entries
        each = size / max(1, len(group.records))
        for at, record in enumerate(group.records, first_place(group.seq)):
            newest[record.hash] = at
            of = entries[record.partition]
            of.places.append(at)
            of.bytes = bytes_ = of.bytes + each
            of.sizes.append(bytes_)
        if group.parts:
            self._named.append((group.seq, group.parts))
        self._tops[-1] = first_place(group.seq + 1)
        self.entries += len(group.records)
        self.entries_seen += len(group.records)
        return True

    def skip(self, seq: int) -> None:
        """Note a message among the groups that is not one: it holds no entries, and the next group names it."""
        if seq > self.seen:
            self._passed(seq, 0)

    def observe_behind_gap(self, group: Group) -> None:
        """Note this group although groups are missing before it: what they said of threads is lost."""
        self._passed(group.before, group.before_id)
        self.observe(group)

    def _passed(self, seq: int, id_: int) -> None:
        self.seen, self.seen_id, self._anywhere = seq, id_, False

    def head(self, hash_: bytes) -> int:
        """The place of the thread's last entry; 0 if it has none above the floor."""
        found = self.remembered(hash_)
        return found if found >= max(self.floor, self.purged) else 0

    def remembered(self, hash_: bytes) -> int:
        """The place of the thread's last entry, also below the floor as long as it is not forgotten; 0 for none."""
        for generation in reversed(self._generations):
            found = generation.get(hash_)
            if found is not None:
                return found
        return 0

    def end(self, partition: int) -> int:
        """The place of the partition's last entry; 0 if it has none above the floor."""
        places = self._entries[partition].places
        return places[-1] if places and places[-1] >= self.floor else 0

    def admits(self, hash_: bytes, expected: int) -> bool:
        """Whether the thread's last entry stands at `expected`; 0: it has none above the floor.

        An expectation below the floor is right if its writer has looked at every group since: a writer drops what it
        remembers of a thread before this object forgets that others have written to it. But not if the entry may be
        purged: the row of a thread whose last entry deletes it is removed then.
        """
        if not expected:
            return not self.head(hash_)
        remembered = self._generations[-1].get(hash_) or self.remembered(hash_)
        if expected < self.purged:
            return False
        return expected == remembered if remembered else expected < self.floor

    def above(self, positions: Mapping[int, int]) -> tuple[Counter[int], int]:
        """How many entries of each partition stand above its position, and about how many bytes these take.

        Of partitions without a position all entries count that were seen above the floor.
        """
        count, size = Counter[int](), 0.0
        for partition, entries in self._entries.items():
            here, bytes_ = entries.above(positions.get(partition, 0))
            if here:
                count[partition] = here
                size += bytes_
        return count, round(size)

    def last_between(self, behind: int, seen: int) -> dict[int, int]:
        """By partition, the place of its last entry in the groups behind `behind`, up to `seen`; above the floor."""
        found = {}
        for partition, entries in self._entries.items():
            at = bisect_right(entries.places, last_place(seen)) - 1
            if at >= 0 and entries.places[at] > last_place(behind):
                found[partition] = entries.places[at]
        return found

    @property
    def much(self) -> bool:
        """Whether so much is remembered, not only of the last group, that it is worth asking where the floor is now."""
        if self.floor >= first_place(self.seen):
            return False
        return self.entries + sum(map(len, self._generations)) >= _LITTLE

    def first_needed(self, seq: int) -> int | None:
        """The first sequence that the groups from this one on need: its own, or that of a part they name.

        None if not all of these groups were seen. A later call must not ask for an earlier sequence.
        """
        if seq <= self.began:
            return None
        while self._named and self._named[0][0] < seq:
            self._named.popleft()
        return min([seq, *(parts for _, parts in self._named)])

    def looked_back(self, seq: int, named: Sequence[tuple[int, int]]) -> None:
        """Note which groups from this one on, up to `began`, name parts, and the first part of each."""
        self._named.extendleft(reversed(named))
        self.began = seq - 1

    def forgets(self, floor: int) -> bool:
        """Whether `forget` would let go of heads: then whatever rests on them must be dropped first."""
        return len(self._tops) > 1 and self._tops[0] <= floor

    def forget(self, floor: int) -> None:
        """Note that everything below this place may be forgotten, and forget what can be. Call this now and then."""
        if floor <= self.floor:
            return
        self.floor = floor
        while len(self._tops) > 1 and self._tops[0] <= floor:
            del self._tops[0], self._generations[0]
        if self._generations[-1] and len(self._generations) < _GENERATIONS_MAX:
            self._generations.append({})
            self._tops.append(self._tops[-1])
        for entries in self._entries.values():
            entries.drop(first_place(group_of(floor)))
        self.entries = sum(len(entries.places) for entries in self._entries.values())
