"""What a process knows of the groups in the log: the last entry of each thread, and up to where that is complete.

Of a thread with entries above the *floor* its head is known, up to the last group that was seen. Below the floor
everything is in every Postgres there will be (`bufstore.buffer.flush.passed`), so nobody needs to be shown it. Groups
are observed in the order of the log and without a gap: each names the one before it.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from bufstore.buffer.groups.group import Group
from bufstore.buffer.places import first_place, group_of

#: Heads are forgotten a generation at a time, so that no entry is looked at again for it.
_GENERATIONS_MAX = 8


class Gap(Exception):
    """A group names another predecessor than the last that was seen: groups are missing, or the log went back."""

    def __init__(self, group: Group, seen: int) -> None:
        super().__init__(f"group {group.seq} stands behind {group.before}, and {seen} was seen last")
        self.group = group


class Heads:
    """The heads of threads; see the module's text."""

    def __init__(self) -> None:
        #: Everything below this place may be forgotten.
        self.floor = 0
        #: Everything below this place may be purged, as groups say.
        self.purged = 0
        #: Sequence and id of the last group seen; 0 for none.
        self.seen = 0
        self.seen_id = 0
        self._anywhere = False
        #: Grows with each `start`: what was checked in an earlier life must be checked anew.
        self.life = 0
        #: The newest last.
        self._generations: list[dict[bytes, int]] = [{}]
        self._tops: list[int] = [0]
        #: By partition, the place of the last entry seen above the floor.
        self._ends: dict[int, int] = {}
        #: What was seen above the floor: place of the first entry, and the partition of each.
        self._groups: deque[tuple[int, bytes]] = deque()
        #: Everything behind this group was seen.
        self._began = 0
        #: Groups that name parts of large entries, and the first of these.
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
        self._ends.clear()
        self._groups.clear()
        self._began = seen
        self._named.clear()

    def observe(self, group: Group) -> bool:
        """Note the next group; False if it was seen before. Raises Gap."""
        if group.seq <= self.seen:
            return False
        follows = (group.before, group.before_id) == (self.seen, self.seen_id)
        if not follows and not (self._anywhere and group.before <= self.seen):
            raise Gap(group, self.seen)
        self._passed(group.seq, group.id)
        self.purged = max(self.purged, group.purged)
        newest = self._generations[-1]
        for at, record in group.places():
            newest[record.hash] = at
            self._ends[record.partition] = at
        if group.parts:
            self._named.append((group.seq, group.parts))
        self._tops[-1] = first_place(group.seq + 1)
        self._groups.append((first_place(group.seq), b"".join([r.partition.to_bytes(2, "big") for r in group.records])))
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
        found = self._ends.get(partition, 0)
        return found if found >= self.floor else 0

    def admits(self, hash_: bytes, expected: int) -> bool:
        """Whether the thread's last entry stands at `expected`; 0: it has none above the floor.

        An expectation below the floor is right if its writer has looked at every group since: a writer drops what it
        remembers of a thread before this object forgets that others have written to it. But not if the entry may be
        purged: the row of a thread whose last entry deletes it is removed then.
        """
        if not expected:
            return not self.head(hash_)
        remembered = self.remembered(hash_)
        if expected < self.purged:
            return False
        return expected == remembered if remembered else expected < self.floor

    def count_above(self, position: Callable[[int], int]) -> int:
        """How many entries stand above the position that this gives for their partition."""
        count = 0
        for first, partitions in self._groups:
            for number in range(len(partitions) // 2):
                partition = int.from_bytes(partitions[2 * number : 2 * number + 2])
                count += first + number > position(partition)
        return count

    @property
    def entries(self) -> int:
        """How many entries were seen above the floor."""
        return sum(len(partitions) // 2 for _, partitions in self._groups)

    def first_needed(self, seq: int) -> int | None:
        """The first sequence that the groups from this one on need: its own, or that of a part they name.

        None if not all of these groups were seen. Never ask for an earlier one later.
        """
        if seq <= self._began:
            return None
        while self._named and self._named[0][0] < seq:
            self._named.popleft()
        return min([seq, *(parts for _, parts in self._named)])

    def forgets(self, floor: int) -> bool:
        """Whether `forget` would let go of heads: then what rests on them is dropped before."""
        return len(self._tops) > 1 and self._tops[0] <= floor

    def forget(self, floor: int) -> None:
        """Everything below this place may be forgotten. Call this now and then."""
        if floor <= self.floor:
            return
        self.floor = floor
        while len(self._tops) > 1 and self._tops[0] <= floor:
            del self._tops[0], self._generations[0]
        if self._generations[-1] and len(self._generations) < _GENERATIONS_MAX:
            self._generations.append({})
            self._tops.append(self._tops[-1])
        while self._groups and group_of(self._groups[0][0]) < group_of(floor):
            self._groups.popleft()
