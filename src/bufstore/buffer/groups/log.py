"""The log of entries, kept as groups in a stream: entries have places, and these answer all that the buffer asks.

`GroupLog` stands between the buffer and the stream: it writes with the `Sequencer`, knows the last entry of each thread
from the `Heads`, and reads an entry with `Entries`. What concerns the stream itself (generations, its leader, how full
it is) it leaves to the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

from bufstore.buffer.groups.backwards import Backwards
from bufstore.buffer.groups.delivery import StreamFeed
from bufstore.buffer.groups.entries import Entries, Purged
from bufstore.buffer.groups.erasing import Erasing
from bufstore.buffer.groups.feeds import Feeds, PartitionFeed
from bufstore.buffer.groups.forgetting import Forgetting
from bufstore.buffer.groups.group import group_in, hash_of, stored_bytes
from bufstore.buffer.groups.heads import Heads
from bufstore.buffer.groups.purging import Purging
from bufstore.buffer.groups.sequencer import Sequencer
from bufstore.buffer.groups.stream import READ_S, GroupsInStream, last_on, messages_on
from bufstore.buffer.groups.tail import Tail
from bufstore.buffer.places import first_place, group_of, last_place, number_of
from bufstore.buffer.ports.log import Altered, Ending, Floor, GroupSizes, Remains, Writes
from bufstore.buffer.ports.shared_state import SharedState
from bufstore.buffer.subjects import Subjects
from bufstore.buffer.target import Target
from bufstore.buffer.windows import Windows
from bufstore.config import BufferConfig
from bufstore.errors import BufstoreError, Closed, LogRolledBack, LogUnavailable
from bufstore.jetstream.messages import AppendUnknown, Conflict, Held, Outgoing, StoredMessage
from bufstore.log_lines import LogLines

_log = LogLines(__name__)

T = TypeVar("T")

#: A replica has what its leader has stored a moment later.
_LAG_S = 0.002
#: How many sequences of the stream count as the last.
_LAST_GROUPS = 64


class GroupLog:
    """See `bufstore.buffer.ports.log.Log`. Positions are places (`bufstore.buffer.places`)."""

    def __init__(self, stream: GroupsInStream, shared: SharedState, config: BufferConfig, name: str) -> None:
        """`name`: the name of this process among those that follow the stream."""
        self._stream, self._shared, self._name = stream, shared, name
        self._subjects = Subjects(config.log.subject, config.log.partitions)
        self._heads = Heads()
        self._forgetting = Forgetting(
            self._heads, lambda: self._sequencer.oldest, self._settled_now, lambda: stream.refused is not None
        )
        anew = self._forgetting.all_begins_anew
        self._tail = Tail(stream, self._subjects.groups, self._heads, self._floor, anew, READ_S)
        self._entries = Entries(self._subjects, stream.held)
        self._backwards = Backwards(self._tail, self._entries, self._head, self._forget_purged)
        self._erasing = Erasing(stream, self._subjects, self._floor)
        self._purging = Purging(stream, self._subjects, self._heads, self._see_all)
        stream.vouched_by(self._tail.last_seen.mismatch)
        # Half of a caller's time: then a lost answer is still resolved before the call ends.
        self._sequencer = Sequencer(
            stream, self._subjects, self._heads, self._tail, self._forgetting.look_soon, config.append_timeout_s / 2
        )
        self._feeds = Feeds(self._follow, self._entries.split, config.flush_max_bytes)
        #: The position below which the owners have said that everything is settled.
        self._said = 0
        #: How often the stream was followed: each time by a consumer of its own.
        self._followed = 0

    # --- writing ----------------------------------------------------------------------------------------------

    @property
    def writer(self) -> Sequencer:
        return self._sequencer

    async def _see_all(self) -> None:
        """Return once everything has been seen that was in the log when this was called. Raises LogUnavailable."""
        await self._tail.see_all()
        self._forgetting.look_soon()

    @property
    def unit_bytes_max(self) -> int:
        return self._sequencer.room

    async def publish(self, message: Outgoing, timeout_s: float) -> int:
        return await self.publish_batch([message], timeout_s)

    async def publish_batch(self, messages: Sequence[Outgoing], timeout_s: float) -> int:
        self._sequencer.start()
        try:
            async with asyncio.timeout(timeout_s):
                if not self._heads.life:
                    await self._see_all()
                return await self._sequencer.submit(messages)
        except TimeoutError:
            raise AppendUnknown("the group was not stored in time") from None

    # --- what is in the log -----------------------------------------------------------------------------------

    async def _floor(self) -> int:
        """The place from which on everything that is in the log must be known."""
        first, _ = await self._stream.bounds()
        # What was erased, and everything before it, was settled, even if what the owners said was lost since.
        erased = group_of(await self.erased())
        return max(first_place(max(first, erased + 1 if erased else 0)), self._settled(await self._shared.floors()))

    def _settled(self, floors: Mapping[int, Floor]) -> int:
        """The position below which all partitions are settled; 0 as long as an owner has not said."""
        partitions = range(self._subjects.partitions)
        settled = min(floors[p].settled for p in partitions) if all(p in floors for p in partitions) else 0
        self._said = max(self._said, settled)
        return settled

    async def _settled_now(self) -> int:
        return self._settled(await self._shared.floors())

    def _head(self, subject: str) -> int:
        return self._heads.head(hash_of(self._subjects.thread_id(subject)))

    async def last(self, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        await self._see_all()
        return await self._backwards.last(subjects)

    async def _forget_purged(self) -> None:
        """Forget a thread's last entry, which was purged or erased: the floor is above it, and nobody builds on it."""
        self._forgetting.forget(await self._floor())

    async def after(self, subject: str, seq: int, limit: int = 0) -> list[StoredMessage]:
        await self._see_all()
        return (await self._backwards.after({subject: seq}, limit))[subject]

    async def seen_after(self, above: Mapping[str, int]) -> dict[str, list[StoredMessage]]:
        return await self._backwards.after(above)

    async def identity(self, seq: int) -> StoredMessage | None:
        # Ask the log itself: this process may remember what is purged, or what the log lost when it went back.
        return await self._entry_in(await self._stream.identity(group_of(seq)), seq)

    async def held_at(self, seq: int) -> StoredMessage | None:
        return await self._entry_in(await self._stream.held(group_of(seq)), seq)

    async def _entry_in(self, message: StoredMessage | None, seq: int) -> StoredMessage | None:
        if message is None or message.subject != self._subjects.groups or (group := group_in(message)) is None:
            return None
        if not group.records and not number_of(seq):
            return self._entries.mark(group)
        with contextlib.suppress(Purged):
            if number_of(seq) < len(group.records):
                return await self._entries.read(group, number_of(seq), message.body)
        return None

    async def scan(
        self,
        above: int = 0,
        *,
        partitions: Collection[int] | None = None,
        threads: Collection[str] | None = None,
        last_up_to: int | None = None,
    ) -> AsyncIterator[tuple[int, StoredMessage]]:
        hashes = {hash_of(thread_id) for thread_id in threads} if threads is not None else None
        async for message in messages_on(self._stream, self._subjects.groups, max(group_of(above) - 1, 0)):
            group = group_in(message)
            if group is None:
                if hashes is None and (partitions is None or 0 in partitions) and first_place(message.seq) > above:
                    yield 0, self._entries.foreign(message)
                continue
            for at, record in group.places():
                if (
                    at > above
                    and (hashes is None or record.hash in hashes)
                    and (partitions is None or record.partition in partitions)
                    and (last_up_to is None or not at < self._heads.head(record.hash) <= last_up_to)
                ):
                    with contextlib.suppress(Purged):
                        yield record.partition, await self._entries.read(group, number_of(at), message.body)

    async def ends(self, subjects: Sequence[str]) -> list[int]:
        await self._see_all()
        return [self._head(subject) for subject in subjects]

    async def partition_ends(self) -> list[int]:
        await self._see_all()
        return self._partition_ends()

    def _partition_ends(self) -> list[int]:
        return [self._heads.end(p) for p in range(self._subjects.partitions)]

    async def latest(self, subject: str, timeout_s: float) -> int:
        await _in_time(self._see_fresh(timeout_s), timeout_s)
        return self._head(subject)

    async def latest_partition_ends(self, timeout_s: float) -> list[int]:
        return await _in_time(self._fresh_partition_ends(timeout_s), timeout_s)

    async def _fresh_partition_ends(self, timeout_s: float) -> list[int]:
        # A process that has seen nothing yet, and stands before a backlog, need not read all of the backlog for this.
        if not self._heads.life:
            partitions, ends = range(self._subjects.partitions), await self._ends_in_last_groups(timeout_s)
            if all(p in ends for p in partitions):
                return [ends[p] for p in partitions]
        await self._see_fresh(timeout_s)
        return self._partition_ends()

    async def _ends_in_last_groups(self, timeout_s: float) -> dict[int, int]:
        """Where those partitions end that have entries in the last groups; empty if the node that answers lags."""
        end = await self._stream.fresh_end(timeout_s)
        if not end:
            last = await last_on(self._stream, self._subjects.groups, timeout_s)
            end = last.seq if last is not None else 0
        above = max(end - _LAST_GROUPS, 0)
        messages = (await self._stream.part(self._subjects.groups, above, timeout_s, _LAST_GROUPS)).messages
        if not messages or messages[-1].seq < end:
            return {}
        groups = filter(None, map(group_in, messages))
        return {record.partition: place for group in groups for place, record in group.places()}

    async def _see_fresh(self, timeout_s: float) -> None:
        """Return once everything has been seen that was acknowledged when this was called. Raises LogUnavailable."""
        end = await self._stream.fresh_end(timeout_s)
        await self._see_all()
        while self._heads.seen < end:  # the replica that answered lags
            await asyncio.sleep(_LAG_S)
            await self._see_all()

    async def end(self, timeout_s: float) -> int:
        return last_place(await self._stream.end(timeout_s))

    async def bounds(self) -> tuple[int, int]:
        first, end = await self._stream.bounds()
        return first_place(first), last_place(end)

    async def purged_to(self) -> int:
        first = (await self._stream.part(self._subjects.groups, 0, READ_S, 1)).messages
        group = group_in(first[0]) if first else None
        return first_place(group.seq) if group is not None and group.before else 0

    async def held(self, positions: Mapping[int, int]) -> Held:
        await self._see_all()
        used, limit = await self._stream.fill()
        entries, size = self._heads.above(positions)
        return Held(used, limit, entries, min(size, used), self._heads.entries_seen)

    async def last_groups(self) -> GroupSizes:
        _, end = await self._stream.bounds()
        sizes = GroupSizes(0, 0, 0)
        above = max(end - _LAST_GROUPS, 0)
        for message in (await self._stream.part(self._subjects.groups, above, READ_S, _LAST_GROUPS)).messages:
            if (group := group_in(message)) is not None:
                size = stored_bytes(group, message)
                sizes = GroupSizes(sizes.groups + 1, sizes.entries + len(group.records), sizes.bytes + size)
        return sizes

    @property
    def writes(self) -> Writes:
        return Writes(self._sequencer.groups, self._sequencer.refusals)

    @property
    def trouble(self) -> str:
        return self.altered.why if self.altered.stops_writes else self._sequencer.trouble

    @property
    def altered(self) -> Altered:
        return self._stream.altered

    # --- following and removing -------------------------------------------------------------------------------

    async def feed(self, partition: int, start: int, wake: Callable[[], None]) -> PartitionFeed:
        return await self._feeds.open(partition, start, wake)

    async def _follow(self, seq: int, wake: Callable[[], None]) -> StreamFeed:
        self._followed += 1
        name = f"{self._name}{self._followed}"
        return await self._stream.follow(name, self._subjects.groups, seq, wake)

    async def let_go(self, floors: Mapping[int, Floor], reached: int | None = None) -> int:
        there = await self._shared.floors()
        known = dict(there)
        for partition, floor in floors.items():
            known[partition] = floor.raised(known.get(partition, floor))
        # Publishing floors has no answer, and they may be lost later: publish them until they can be read.
        if said := {p: known[p] for p in floors if there.get(p) != known[p]}:
            await self._shared.put_floors(said)
        if not all(p in known for p in range(self._subjects.partitions)):
            return 0
        settled, purgeable = self._settled(known), min(floor.purgeable for floor in known.values())
        if reached is not None:
            settled, purgeable = min(settled, reached), min(purgeable, reached)
        self._forgetting.forget(settled)
        await self._purging.purge(group_of(purgeable))
        if reached is not None:
            await self._close_off(group_of(reached))
        return first_place(self._purging.purged)

    async def _close_off(self, flushed: int) -> None:
        """Store a group behind parts of large entries that came to nothing, if they cannot be purged otherwise."""
        try:
            if await self._purging.is_held_up(flushed):
                await self.publish_batch([], READ_S)
        except Closed:
            return  # the next process that opens the log does it
        except (BufstoreError, Conflict, AppendUnknown) as e:
            _log.warning(
                "cannot make sure that unused parts of large entries get purged; trying again later: %s",
                e,
                extra={"action": "parts_left"},
            )

    async def fence(self, below: int) -> None:
        self._sequencer.start()
        try:
            async with asyncio.timeout(READ_S):
                await self._sequencer.fence(below)
        except (Conflict, TimeoutError):
            raise AppendUnknown("could not confirm that every writer knows what is purged") from None

    def on_forget(self, callback: Callable[[bool], None]) -> None:
        self._forgetting.on_forget(callback)

    def known_head(self, subject: str) -> int:
        return self._heads.remembered(hash_of(self._subjects.thread_id(subject)))

    async def settled(self) -> int:
        return await self._floor()

    async def remains(self, below: Mapping[str, int]) -> Remains:
        return await self._erasing.remains(below)

    async def erase(self, remains: Remains) -> None:
        await self._erasing.erase(remains)

    async def erased(self) -> int:
        return await self._erasing.erased()

    async def aclose(self) -> None:
        """Write and deliver nothing any more."""
        await self._forgetting.aclose()
        await self._feeds.aclose()
        await self._sequencer.aclose()
        await self._tail.aclose()

    # --- the stream itself ------------------------------------------------------------------------------------

    @property
    def generation_start(self) -> int:
        return first_place(self._stream.generation_start)

    @property
    def floor(self) -> int:
        return self._said

    @property
    def windows(self) -> Windows:
        return self._stream.windows

    async def set_windows(self, windows: Windows) -> None:
        await self._stream.set_windows(windows)

    async def epoch(self, *, checked: bool = True) -> int | None:
        return await self._stream.epoch(checked=checked)

    async def create(self, epoch: int, target: Target) -> None:
        await self._stream.create(epoch, target)

    @property
    def target(self) -> Target | None:
        return self._stream.target

    async def withdraw(self, common: Sequence[int]) -> Sequence[int]:
        return await self._stream.withdraw(common)

    async def remove(self) -> None:
        await self._stream.remove()

    async def prove_leader(self, timeout_s: float) -> None:
        await self._stream.prove_leader(timeout_s)

    async def barrier(self, timeout_s: float) -> int:
        seq = await self._stream.barrier(timeout_s)
        return first_place(seq) if seq else 0

    async def fill(self) -> tuple[int, int]:
        return await self._stream.fill()

    @property
    def refused(self) -> LogRolledBack | None:
        return self._stream.refused

    def refuse(self, why: LogRolledBack) -> None:
        self._stream.refuse(why)

    def vouched_by(
        self,
        mismatch: Callable[[], Awaitable[object]],
        flushed: Callable[[Mapping[int, Ending], int], Awaitable[bool]],
    ) -> None:
        async def either() -> object:
            return await self._tail.last_seen.mismatch() or await mismatch()

        async def flushed_to(places: Mapping[int, int], seen: int) -> bool:
            return await flushed({p: self._ending(at) for p, at in places.items()}, seen)

        self._stream.vouched_by(either)
        self._tail.flushed = flushed_to

    def _ending(self, at: int) -> Ending:
        known = self._tail.at_hand(group_of(at))
        return Ending(at, self._entries.head(known[0], number_of(at), known[1]) if known is not None else None)


async def _in_time(look: Awaitable[T], timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await look
    except TimeoutError:
        raise LogUnavailable("the log did not report its end in time") from None
