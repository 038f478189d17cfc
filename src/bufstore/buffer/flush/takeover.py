"""Takes partitions, follows them, gives them up.

Any doubt about a partition ends in the same way: the partition is given up with everything of it in memory, and taken
again from the cursor in Postgres, with a higher term. So nothing is ever repaired in memory.

Taking is a task of its own, and so is following each partition: if somebody holds a partition's row, or the server
does not create its consumer, that delays neither the other partitions nor flushing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

from bufstore.buffer.entry import entry_id
from bufstore.buffer.flush.flusher_state import FlusherState
from bufstore.buffer.flush.owned_partition import OwnedPartition
from bufstore.buffer.groups.delivery import LostAgain
from bufstore.buffer.parts import AnyParts
from bufstore.buffer.ports.ledger import Cursor, FlushFailed
from bufstore.buffer.ports.log import Log
from bufstore.buffer.target import check_proof, check_same, refusal
from bufstore.errors import BufstoreError, ConfigDrift, ConfigError, LogRolledBack, LogUnavailable, StoreUnavailable
from bufstore.failpoints import Failpoint, reach
from bufstore.jetstream.messages import AppendUnknown
from bufstore.log_lines import LogLines
from bufstore.tasks import end, set_within, spawn

_log = LogLines(__name__)

_TAKE_RETRY_S = 0.5
#: What somebody has to configure does not pass by itself, and each try raises a term, and may be a line in the log of
#: NATS. So the pause doubles each time, up to this one.
_CONFIGURED_RETRY_S = 15.0
#: The row of a partition that somebody holds is tried again after the first time. It is free once a flush has ended, or
#: an owner that stopped was thrown out; after the second time, the trouble is reported, and it is tried less often.
_HELD_RETRY_S = 0.1
_HELD_SAID_S = 2.0
_LOOK_S = 1.0
#: A feed that is lost sooner than this after it was followed may be lost so each time: that is trouble.
_AT_ONCE_LOST_S = 1.0
_CLOSE_S = 10.0
#: If a caller asks for a flush of what is already flushed, we look into Postgres, but not more often than this.
_COMPARE_S = 0.5
#: The answer to a commit takes fewer seconds than this.
_COMMIT_S = 2.0
#: How many partitions are checked and followed at the same time.
_AT_ONCE = 16
_BARRIER_S = 5.0


async def mismatch(log: Log, cursor: Cursor, reached: int = 0) -> str | None:
    """Return why the log is not the one that the cursor belongs to; None when it is. Raises LogUnavailable.

    `reached`: how far the log certainly goes, whatever the node that answers has of it.
    """
    end = max(await log.end(5.0), reached)
    if end < cursor.seq:
        return f"the log ends at {end}, but Postgres has applied partition {cursor.partition} up to {cursor.seq}"
    if (erased := await log.erased()) and cursor.seq <= erased:
        return (
            f"the log is erased up to {erased}, but Postgres has applied partition {cursor.partition} only up to "
            f"{cursor.seq}"
        )
    if cursor.id and cursor.seq >= log.generation_start:
        # The entry at the cursor is never purged. If it is not there, either the log was purged further than this
        # Postgres has got, or it is not the same log.
        found = await (log.held_at if reached else log.identity)(cursor.seq)
        if found is None or entry_id(found) != cursor.id:
            return f"position {cursor.seq} no longer holds the entry at the cursor of partition {cursor.partition}"
    return None


async def never_flushed(log: Log, cursors: Iterable[Cursor]) -> str | None:
    """Return why the log cannot be that of a Postgres that has flushed nothing of it; None if it can, or it has."""
    if all(cursor.seq < log.generation_start for cursor in cursors) and (first := await log.purged_to()):
        return f"the log is purged up to {first}, but nothing of it was flushed into this Postgres"
    return None


async def proven(log: Log, look: Callable[[int], Awaitable[str | None]]) -> str | None:
    """Return what `look` finds wrong with the log, confirmed after the log's leader has proved that it leads.

    A leader that the other nodes have left shows an old end for some seconds, also beside its successor, which stores
    the proof. So `look` is told how far the log certainly goes (0: it is not known). Raises LogUnavailable.
    """
    if await look(0) is None:
        return None
    try:
        stored = await log.barrier(_BARRIER_S)
    except AppendUnknown:
        raise LogUnavailable(
            "the log shows a wrong end, and its leader cannot prove that it leads; will check again"
        ) from None
    found = await look(stored)
    if found is not None and stored and await log.end(_BARRIER_S) < stored:
        raise LogUnavailable("a node that no longer leads the log reports a wrong end for it; will check again")
    return found


def pause_s(error: Exception, last_s: float) -> float:
    """Return the seconds until a partition is tried again after `error`; `last_s` is the pause before, 0 for none."""
    if not isinstance(error, ConfigError):
        return _TAKE_RETRY_S
    return min(max(2 * last_s, _TAKE_RETRY_S), _CONFIGURED_RETRY_S)


class Takeover:
    """The partitions of one owner: `owned_partitions` holds those that it follows, and changes here only."""

    def __init__(
        self,
        parts: AnyParts,
        member: str,
        prepare: Callable[[], Awaitable[None]],
        wake: Callable[[], None],
        state: FlusherState,
    ) -> None:
        self._log, self._ledger, self._subjects = parts.log, parts.ledger, parts.subjects
        self._stream, self._flush_interval_s = parts.config.log.stream, parts.config.flush_interval_s
        self._member = member
        self._prepare = prepare
        self._prepared = False
        self._wake = wake
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._wanted: frozenset[int] = frozenset()
        #: True while other owners may have taken the partitions: see `hold`.
        self._holding = False
        #: Partitions that could not be taken, and when to try again.
        self._untakeable: dict[int, float] = {}
        #: The pause before that, of those that could not be taken because of an error.
        self._pauses_s: dict[int, float] = {}
        #: Partitions whose rows somebody else holds, and since when.
        self._held: dict[int, float] = {}
        #: When we last began to follow each partition.
        self._followed_at: dict[int, float] = {}
        #: Until when a feed that was lost at once counts as trouble: until then the next one may be lost at once, too.
        self._doomed_until = float("-inf")
        #: The term that each partition had when it was last ours.
        self._terms: dict[int, int] = {}
        #: Partitions that are already ours in Postgres, on their way into `owned_partitions`.
        self._following: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._compared_at = float("-inf")
        #: Cursors in Postgres whose term is one above ours, and since when we have seen them.
        self._raised: dict[Cursor, float] = {}
        self.owned_partitions: dict[int, OwnedPartition] = {}

    @property
    def complete(self) -> bool:
        """Whether no partition of ours has failed to be taken or followed, and no feed was lost at once lately."""
        return self._wanted.isdisjoint(self._untakeable) and self._loop.time() >= self._doomed_until

    def want(self, partitions: frozenset[int]) -> None:
        """Set the partitions that are ours from now on; `keep` takes them."""
        if self._holding or partitions != self._wanted:
            self._wanted, self._holding = partitions, False
            self._changed.set()
            self._wake()

    def hold(self) -> None:
        """Keep what is followed until another owner takes it, and take nothing else, because the lease is in doubt.

        A replaced owner commits nothing (because of its term), and its feed ends with its consumer. If a feed is lost
        for another reason, Postgres still has our term: nobody has taken the partition, so we take it again.
        """
        self._holding = True

    def look(self) -> None:
        """Make `keep` look now."""
        self._changed.set()

    def give_up(self) -> None:
        """Give up the partitions that are lost or not ours; `keep` takes those again that are ours."""
        for partition, owned in list(self.owned_partitions.items()):
            lost = owned.feed.lost or owned.doubt
            if lost is not None:
                self._note_lost_at_once(partition, lost)
                self.drop(owned, lost)
            elif partition not in self._wanted:
                self.drop(owned, "another member owns it")

    def _note_lost_at_once(self, partition: int, reason: str) -> None:
        now = self._loop.time()
        again = isinstance(reason, LostAgain)
        if again or now - self._followed_at[partition] < _AT_ONCE_LOST_S:
            self._untakeable[partition] = now + _TAKE_RETRY_S
            until_first_ack_s = self._flush_interval_s if again else 0.0
            self._doomed_until = now + _TAKE_RETRY_S + until_first_ack_s + 2 * _AT_ONCE_LOST_S
            self._state.report(LogUnavailable(reason if again else f"feeds are lost as soon as they start: {reason}"))

    async def keep(self, stopping: asyncio.Event) -> None:
        """Take the partitions that are ours, until `stopping`."""
        while not stopping.is_set():
            self._changed.clear()
            self.give_up()
            now = self._loop.time()
            missing = self._wanted - self.owned_partitions.keys() - self._following
            due = sorted(p for p in missing if self._untakeable.get(p, 0.0) <= now)
            if due and self._holding:
                due = await self._still_ours(due)
            if due:
                await self._take(due)
            soonest = min((self._untakeable.get(p, 0.0) for p in missing), default=now + _LOOK_S)
            await set_within(self._changed, min(max(soonest - self._loop.time(), _HELD_RETRY_S), _LOOK_S))

    async def aclose(self) -> None:
        """Give up everything."""
        self._wanted = frozenset()
        await self._ended()
        for owned in list(self.owned_partitions.values()):
            self.drop(owned, "the store closes", logging.DEBUG)
        await self._ended()

    async def _ended(self) -> None:
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_CLOSE_S)
            await end(*late)

    async def _still_ours(self, partitions: list[int]) -> list[int]:
        """Return those that nobody has taken since we did."""
        again_at = self._loop.time() + _TAKE_RETRY_S
        try:
            cursors = await self._ledger.cursors()
        except (BufstoreError, FlushFailed):
            cursors = {}
        ours = [p for p in partitions if p in cursors and cursors[p].term == self._terms.get(p)]
        self._untakeable.update(dict.fromkeys(set(partitions).difference(ours), again_at))
        return ours

    async def _take(self, partitions: list[int]) -> None:
        """Raise the terms of the partitions whose rows nobody holds, and begin to follow them."""
        try:
            if not self._prepared:
                await self._prepare()
                self._prepared = True
            cursors = await self._ledger.take(partitions, self._member)
            self._terms.update((cursor.partition, cursor.term) for cursor in cursors)
            await self._check_target()  # not before: Postgres may have become another one in between
        except (BufstoreError, FlushFailed) as e:
            self._failed(partitions, e)
            return
        reach(Failpoint.TAKE_RAISED)
        self._note_held(set(partitions) - {cursor.partition for cursor in cursors})
        for cursor in cursors:
            self._held.pop(cursor.partition, None)
            self._following.add(cursor.partition)
            self._start(self._try_to_follow(cursor)).add_done_callback(partial(self._tried, cursor.partition))

    async def _check_target(self) -> None:
        """Raise ConfigDrift, and refuse the log, if this Postgres does not say that the log is flushed into it.

        An empty one has cursors that fit a log of which nothing is purged.
        """
        named, noted = self._log.target, await self._ledger.target()
        try:
            check_same(self._stream, named, noted)
            if named is not None and noted is None:
                check_proof(self._stream, named, proven=False)
        except ConfigDrift as e:
            self._log.refuse(refusal(e))
            raise

    def _failed(self, partitions: Iterable[int], error: Exception) -> None:
        self._state.report(error)
        for partition in partitions:
            pause = self._pauses_s[partition] = pause_s(error, self._pauses_s.get(partition, 0.0))
            self._untakeable[partition] = self._loop.time() + pause

    def _note_held(self, partitions: set[int]) -> None:
        now = self._loop.time()
        for partition in sorted(partitions):
            since = self._held.setdefault(partition, now)
            said = now - since > _HELD_SAID_S
            self._untakeable[partition] = now + (_TAKE_RETRY_S if said else _HELD_RETRY_S)
            if said:
                reason = f"partition {partition} cannot be taken: another session holds its row in buffer_partitions"
                self._state.report(StoreUnavailable(reason))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return spawn(work, name="bufstore-flusher-partition", among=self._tasks)

    async def _try_to_follow(self, cursor: Cursor) -> None:
        try:
            async with self._at_once:
                await self._follow(cursor)
            self._untakeable.pop(cursor.partition, None)
            self._pauses_s.pop(cursor.partition, None)
        except (BufstoreError, FlushFailed, AppendUnknown) as e:
            self._failed([cursor.partition], e)
        except Exception as e:
            self._state.trouble = f"takeover: unexpected {type(e).__name__}"
            _log.exception(
                "cannot follow a partition; will try again, and its entries stay in the log",
                extra={"action": "flusher_error"},
            )
            self._untakeable[cursor.partition] = self._loop.time() + _TAKE_RETRY_S

    def _tried(self, partition: int, _: asyncio.Task[None]) -> None:
        """Let go of a partition that is followed now, or is not; perhaps its task was cancelled before it began."""
        self._following.discard(partition)
        self._wake()

    async def _follow(self, cursor: Cursor) -> None:
        """Check that the log is still the one that the cursor belongs to, and follow it from there."""
        trouble = await proven(self._log, lambda reached: self._mismatch(cursor, reached))
        if trouble is not None:
            self._log.refuse(LogRolledBack(trouble))
            raise LogRolledBack(trouble)
        # Since the term was raised, nobody but us changes the entries that wait in the ledger.
        queues = await self._ledger.waiting.queues(cursor.partition)
        feed = await self._log.feed(cursor.partition, cursor.seq + 1, self._wake)
        owned = self.owned_partitions[cursor.partition] = OwnedPartition(cursor, feed, self._subjects, queues)
        self._followed_at[cursor.partition] = self._loop.time()
        if cursor.seq:
            # Everything up to the cursor is committed, since an unknown time: retention counts from now.
            owned.passed.note(self._loop.time(), cursor.seq)
        self._state.takeovers += 1
        self._state.partitions = tuple(sorted(self.owned_partitions))

    async def _mismatch(self, cursor: Cursor, reached: int) -> str | None:
        """Return `mismatch` for a cursor that is still the partition's. Raises LogUnavailable when it no longer is."""
        reason = await mismatch(self._log, cursor, reached)
        if reason is None and cursor.seq < self._log.generation_start:
            reason = await never_flushed(self._log, (await self._ledger.cursors()).values())
        # While this process stood still for long, others may have gone on, and the log was purged behind them.
        if reason is not None and (await self._ledger.cursors()).get(cursor.partition) != cursor:
            raise LogUnavailable(f"another owner took partition {cursor.partition} meanwhile")
        return reason

    async def compare(self) -> Mapping[int, Cursor]:
        """Doubt the partitions whose cursors Postgres no longer has: it went back, or another owner has taken them.

        Returns all cursors.

        Without this, nobody would notice for a partition to which nothing is written. Raises what `Ledger.cursors`
        raises.
        """
        known = {p: (owned, owned.cursor) for p, owned in self.owned_partitions.items()}
        cursors = await self._ledger.cursors()
        self._raised = {cursor: since for cursor, since in self._raised.items() if cursor in cursors.values()}
        for partition, (owned, ours) in known.items():
            found = cursors.get(partition, Cursor(partition, 0, 0, 0))
            # Postgres may be ahead of `ours`: a flush of ours may be on its way.
            if found == owned.cursor:
                continue
            raised = found == Cursor(partition, ours.term + 1, ours.seq, ours.id)
            since = self._raised.setdefault(found, self._loop.time()) if raised else float("-inf")
            if self._loop.time() - since < _COMMIT_S:
                continue  # a commit of ours that raises the term and moves no cursor may be on its way, too
            # What we commit while Postgres answers raises the term, too; the next look sees whether that was us.
            highest = ours.term if owned.cursor == ours else owned.cursor.term + 1
            back = found.seq < ours.seq or (found.seq == ours.seq and found.id != ours.id)
            if back or not ours.term <= found.term <= highest:
                owned.doubt = f"Postgres has {found}, not {ours}"
                self._wake()
        return cursors

    async def compare_for_asker(self) -> None:
        """`compare`, but not too often, for a caller that asks for a flush although everything is flushed."""
        if self.owned_partitions and self._loop.time() - self._compared_at >= _COMPARE_S:
            self._compared_at = self._loop.time()
            with contextlib.suppress(BufstoreError, FlushFailed):
                await self.compare()

    def drop(self, owned: OwnedPartition, reason: str, level: int = logging.INFO) -> None:
        """Give the partition up; its memory is void."""
        number = owned.cursor.partition
        _log.log(level, "gave up partition %d: %s", number, reason, extra={"action": "partition_dropped"})
        self.owned_partitions.pop(owned.cursor.partition, None)
        self._terms[owned.cursor.partition] = owned.cursor.term  # a commit that moves no cursor raises the term
        self._state.partitions = tuple(sorted(self.owned_partitions))
        reach(Failpoint.SHARE_DROPPED)
        self._start(self._close(owned))
        self._changed.set()

    async def _close(self, owned: OwnedPartition) -> None:
        with contextlib.suppress(BufstoreError, AppendUnknown):
            await owned.feed.close()
