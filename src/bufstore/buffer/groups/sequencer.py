"""The writer of groups: one group on its way, which follows the last group that this process has seen.

A group is stored only if nobody stored one since (the expected last sequence of the groups' subject). So its writer
knew every entry before it, and what it checked against these still holds: the log contains only what counts. Units that
come while a group is on its way make the next one. A second group on its way would be wrong: sent after one that loses,
it could still be stored, although it was drafted on the loser.

If another writer was first, the units whose threads were touched meanwhile end with Conflict, and the rest goes with
the next group. What the others wrote is heard (`bufstore.buffer.groups.others`), or read. Until a group's outcome is
known (`bufstore.buffer.groups.sending`), nothing else is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from bufstore.buffer.groups.choosing import BYTES_MAX, Chosen, Queued, choose, count_fitting, too_large, unfit
from bufstore.buffer.groups.group import HEAD_BYTES_MAX, Draft, hash_of, size_of, stored_bytes
from bufstore.buffer.groups.heads import Heads
from bufstore.buffer.groups.large_units import LargeUnits
from bufstore.buffer.groups.others import Others, group_id
from bufstore.buffer.groups.sending import Sending, parts_too_old
from bufstore.buffer.groups.stream import GroupsInStream, OnItsWay
from bufstore.buffer.groups.tail import Tail, Written
from bufstore.buffer.places import ENTRIES_MAX, place
from bufstore.buffer.subjects import Subjects
from bufstore.errors import BufstoreError, Closed, Unavailable
from bufstore.jetstream.group_commit import AppendUnit, Awaited, end_all, end_one, unanswered, unsent
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, StoredMessage
from bufstore.log_lines import LogLines
from bufstore.tasks import end, interrupted, spawn

_log = LogLines(__name__)

#: For how long a writer that others have overtaken on a thread of theirs expects to be overtaken again.
_SHARED_S = 1.0
#: After how many groups of one unit in a row their writer counts as alone. Where two write together now and then, the
#: second would wait for the answer to the first.
_LONE = 8
#: The seconds until the task that writes is begun anew after somebody has cancelled it, or it has failed.
_AGAIN_S = 0.5


class _Posted(NamedTuple):
    """A group that was sent without a task, and how that ended: a task has to go on."""

    group: Sending
    outcome: int | Exception


class Sequencer:
    """Writes units to the log, one group at a time."""

    def __init__(
        self,
        stream: GroupsInStream,
        subjects: Subjects,
        heads: Heads,
        tail: Tail,
        stored: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """`stored`: called after each group that this process wrote. `timeout_s`: the longest wait for one answer."""
        self._stream, self._subjects, self._heads, self._tail = stream, subjects, heads, tail
        self._stored, self._timeout_s = stored, timeout_s
        self._waiting: deque[Queued] = deque()
        #: How many callers gave up since units without a caller were last looked for.
        self._gone = 0
        self._sending: Sequence[Queued] = ()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        #: How many bytes of entries fit into one message of the server, as it was last known.
        self.room = BYTES_MAX - HEAD_BYTES_MAX
        #: The place below which the log may be purged.
        self._purged = 0
        #: The numbers that tell this writer's groups from others', and from each other.
        self._me = int.from_bytes(os.urandom(4)) >> 1 or 1
        self._numbers = itertools.count(int.from_bytes(os.urandom(4)))
        self._large = LargeUnits(stream, subjects, self._look_at_limit, self._queue, timeout_s)
        self._others = Others(stream, subjects, self._me, self._heard, lambda: heads.seen, self._is_wanting)
        #: When another writer was found to write to the same threads; None: not lately.
        self._overtaken_at: float | None = None
        #: The group on its way.
        self._group: Sending | None = None
        #: What is on its way without a task.
        self._posted: OnItsWay | None = None
        #: How many groups in a row had one unit, and left none waiting.
        self._lone = 0
        #: How many groups were stored, and how often another writer was first.
        self.groups = 0
        self.refusals = 0

    def start(self) -> None:
        """Begin to send; needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._look_at_limit()
        if self._waiting:
            self._work_soon()

    async def aclose(self) -> None:
        """Stop. What is still waiting fails with Closed; what is on its way with AppendUnknown."""
        self._closed = True
        if self._posted is not None:
            self._posted.cancel()
            units, self._sending, self._group = self._sending, (), None
            _end_all(units, unanswered(closed=True))
        await self._large.aclose()
        await end(self._task)
        await self._others.aclose()
        waiting = [*self._waiting]  # also of a task that was cancelled before it began
        self._waiting.clear()
        _end_all(waiting, unsent(closed=True))

    def submit(self, messages: Sequence[Outgoing]) -> asyncio.Future[int]:
        """Queue a unit. The future gives the place of its last entry once it is durable.

        It fails with Conflict, LogFull, LogUnavailable (nothing stored), or AppendUnknown. Cancelling the future
        takes the unit back if it was not sent yet.
        """
        unit = Awaited(messages)
        self.add(unit)
        return unit.stored

    async def fence(self, below: int) -> None:
        """Have a group say that the log is purged below this place: every writer has to know it then.

        Raises as `submit`.
        """
        self._purged = max(self._purged, below)
        if self._heads.purged < below:
            await self.submit([])

    def add(self, unit: AppendUnit) -> None:
        """Queue a unit, whose `ended` is called later: see `submit`."""
        if self._closed:
            asyncio.get_running_loop().call_soon(end_all, [unit], Closed("the store is closed"))
            return
        messages, heads = unit.messages, self._heads
        size = unit.size or sum(map(size_of, messages))
        queued = Queued(unit, heads.seen, heads.life, messages, size)
        if size <= self.room and len(messages) <= ENTRIES_MAX:
            self._queue(queued)
        else:
            self._in_parts(queued)

    def gave_up(self) -> None:
        """Note that the caller of some unit gave up.

        Unless NATS answers, units wait here. So that those that nobody waits for do not add up, look for them each time
        that they may be half.
        """
        self._gone += 1
        if 2 * self._gone <= len(self._waiting):
            return
        self._gone = 0
        alive, gone = deque[Queued](), list[Queued]()
        for queued in self._waiting:
            # A caller that gave up on a large entry was told that it may be stored, so such a unit goes on.
            (gone if queued.unit.given_up and not queued.elsewhere else alive).append(queued)
        if gone:
            self._waiting = alive
            _end_all(gone, Conflict("its caller gave up"))

    def _in_parts(self, queued: Queued) -> None:
        """Queue a unit that does not fit into a message, with its large entries in parts."""
        messages = queued.messages
        if not queued.elsewhere and (elsewhere := too_large(messages, self.room)):
            self._large.store(msgspec.structs.replace(queued, elsewhere=elsewhere))
        else:
            asyncio.get_running_loop().call_soon(_end_all, [queued], unfit(messages, self.room))

    def _queue(self, queued: Queued) -> None:
        # Looked at only while others write to the same threads: it costs.
        if self._overtaken_at is not None and self._is_overtaken(queued):
            asyncio.get_running_loop().call_soon(_end_all, [queued], Conflict("another entry was stored first"))
            return
        self._waiting.append(queued)
        self._work_soon()

    def _heard(self, seq: int, header: str, size: int, body: bytes | None) -> int | None:
        """Note another writer's group; units that wait, and that it has overtaken, end without waiting for a turn."""
        heard = self._tail.hear(seq, header, size, body)
        overtaken = [queued for queued in self._waiting if self._is_overtaken(queued)]
        if overtaken:
            self._waiting = deque(queued for queued in self._waiting if queued not in overtaken)
            _end_all(overtaken, Conflict("another entry was stored first"))
        return heard

    def _is_overtaken(self, queued: Queued) -> bool:
        """Whether a unit cannot be stored any more; asked only while others write to the same threads."""
        if not (queued.messages and self._are_shared()):
            return False
        first = queued.messages[0]
        overtaken = first.expected is not None and not (
            queued.life == self._heads.life
            and self._heads.admits(hash_of(self._subjects.thread_id(first.subject)), first.expected)
        )
        if overtaken:
            self._overtaken_at = asyncio.get_running_loop().time()
        return overtaken

    def _is_wanting(self) -> bool:
        return bool(self._waiting or self._sending)

    def _are_shared(self) -> bool:
        """Whether others write to the same threads."""
        at = self._overtaken_at
        if at is not None and asyncio.get_running_loop().time() - at > _SHARED_S:
            self._overtaken_at = at = None
        return at is not None

    def _look_at_limit(self) -> int:
        with contextlib.suppress(Unavailable):  # not connected, or closed: the write will say so
            self.room = self._stream.message_bytes_max - HEAD_BYTES_MAX
        return self.room

    @property
    def oldest(self) -> int | None:
        """The last group that was seen when the oldest unit came that is not stored; None if there is no such unit."""
        # A large unit is queued when its parts are stored, behind others that came later.
        return min((q.seen for q in (*self._sending, *self._waiting, *self._large.units)), default=None)

    @property
    def trouble(self) -> str:
        """See `bufstore.buffer.ports.log.Log`."""
        if (down := self._down()) is not None:
            return str(down)
        unanswered = self._group.unanswered if self._group is not None else 0
        if max(unanswered, self._large.unanswered) < 2:  # after one, the connection may have been lost
            return ""
        return "NATS does not answer writes; if its disk is full, free some space and restart nats-server"

    def _down(self) -> BufstoreError | None:
        """Why the process is not connected; None: it is."""
        try:
            self._stream.message_bytes_max  # noqa: B018 - it raises then
        except BufstoreError as e:
            return e
        return None

    def _work_soon(self) -> None:
        """Begin one turn of the loop later: writers that were woken together have their next entries ready then.

        A writer that was alone before is not made to wait.
        """
        if self._loop is not None and self._task is None and self._posted is None and not self._post():
            self._begin()

    def _begin(self, posted: _Posted | None = None) -> None:
        self._task = spawn(self._work(posted), name="bufstore-groups")
        self._task.add_done_callback(self._worked)

    async def _work(self, posted: _Posted | None) -> None:
        if asyncio.current_task() is not self._task:  # a signal came before it was noted, and another one may work
            return
        if posted is not None and (message := await self._guarded(self._sending, posted)) is not None:
            await self._others.wrote(message, whole=self._are_shared())
        while self._waiting:
            await self._others.go_first()
            if (message := await self._guarded(self._take())) is not None:
                await self._others.wrote(message, whole=self._are_shared())

    def _post(self) -> bool:
        """Send the only unit that waits before this returns, without a task; False if it has to be a task's.

        A task would begin a turn of the loop later, and learn of the answer a turn after it came: for a lone writer,
        two turns of five (docs/adr/0060).
        """
        heads, waiting = self._heads, self._waiting
        if not (self._lone >= _LONE and len(waiting) == 1 and heads.life and self._others.away and self._stream.posts):
            return False
        queued = waiting[0]
        if queued.elsewhere or queued.unit.given_up or not self._tail.last_seen.confirmed:
            return False
        units = [queued]
        try:
            waiting.popleft()
            self._sending = units
            chosen = choose(units, heads, self._subjects)
            if chosen.units:
                self._group = group = self._drafted(chosen)
                self._posted = self._stream.post(group.message, self._timeout_s, partial(self._answered, group))
                group.sent_at = asyncio.get_running_loop().time()
            if self._posted is None:
                queued.unit.refused()
                self._sending, self._group = (), None
                waiting.append(queued)
                return False
        except BaseException as e:
            self._sending, self._group, self._posted = (), None, None
            if waiting and waiting[0] is queued:
                waiting.popleft()
            asyncio.get_running_loop().call_soon(self._failed, units, e)  # later, as of every unit that was queued
            if not isinstance(e, Exception):  # of a signal's handler; the app may run the loop again
                raise
        return True

    def _answered(self, group: Sending, outcome: int | Exception) -> None:
        """Go on with what `_post` sent. This runs where answers are read, which no error must end."""
        if self._group is not group:  # an error came while it was sent
            return
        units = self._sending
        try:
            self._sending, self._group, self._posted = (), None, None
            if isinstance(outcome, int) and self._others.away:
                group.took()
                self._on_stored(units, group.written(outcome))
                self._others.wrote_unheard()
            elif isinstance(self._down(), Closed):  # somebody ends the loop, and would meet a new task: see `_worked`
                _end_all(units, unanswered(closed=False))
                asyncio.get_running_loop().call_later(_AGAIN_S, self._go_on)
                return
            else:
                self._sending, self._group = units, group
                self._begin(_Posted(group, outcome))
        except BaseException as e:
            if self._group is group:
                self._sending, self._group, self._posted = (), None, None
            self._failed(units, e)
            if not isinstance(e, Exception):
                asyncio.get_running_loop().call_soon(_raise, e)
        self._go_on()

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if self._sending:  # the task was cancelled before it began, and what it was to look after is on its way
            units, self._sending, self._group = self._sending, (), None
            _end_all(units, unanswered(closed=self._closed))
        if task.cancelled() or (task.exception() is not None and not interrupted(task)):
            # Perhaps before it began. Who ends all tasks of a loop would meet a new one, again and again; the loop
            # does not live until this time, then.
            task.get_loop().call_later(_AGAIN_S, self._go_on)
        else:
            self._go_on()

    def _go_on(self) -> None:
        if self._waiting and not self._closed:
            self._work_soon()

    def _take(self) -> list[Queued]:
        waiting = self._waiting
        self._look_at_limit()
        count = count_fitting(waiting, self.room + HEAD_BYTES_MAX)
        taken = [waiting.popleft() for _ in range(count)]
        if taken and taken[0].size > self.room:  # it is alone: the server takes smaller messages than when it came
            self._in_parts(taken[0])
            return []
        # A caller that gave up on a large entry was told that it may be stored, so such a unit goes on.
        given_up = [queued for queued in taken if queued.unit.given_up and not queued.elsewhere]
        if given_up:
            _end_all(given_up, Conflict("its caller gave up"))
            taken = [queued for queued in taken if queued not in given_up]
        return taken

    async def _guarded(self, units: Sequence[Queued], posted: _Posted | None = None) -> StoredMessage | None:
        """Store the units, or say how they ended. Returns the message of the group that was stored."""
        self._sending = units
        try:
            return await (self._store(units) if posted is None else self._send(posted.group, units, posted.outcome))
        except asyncio.CancelledError:
            _end_all(units, unanswered(closed=self._closed))
            raise
        except BufstoreError as e:  # the log could not be looked at, and nothing was sent
            _end_all(units, e)
        except BaseException as e:
            self._failed(units, e)
            if not isinstance(e, Exception):  # of a signal's handler; the app may run the loop again
                raise
        finally:
            self._sending, self._group = (), None
        return None

    def _failed(self, units: Sequence[Queued], error: BaseException) -> None:
        # Never leave writers waiting until their deadlines.
        if not isinstance(error, Exception):
            _end_all(units, AppendUnknown("a signal interrupted the write"))
            return
        _log.error(
            "a group could not be written; the outcome of its writes is unknown",
            extra={"action": "group_commit_error"},
            exc_info=error,
        )
        _end_all(units, AppendUnknown(f"unexpected {type(error).__name__}"))

    async def _store(self, units: Sequence[Queued]) -> StoredMessage | None:
        if not self._heads.life:
            await self._tail.see_all()
        chosen = self._choose(units)
        if chosen.moved:
            self._overtaken_at = asyncio.get_running_loop().time()
            _end_all(chosen.moved, Conflict("another entry was stored first"))
        if not chosen.units:
            return None
        return await self._send(self._drafted(chosen), chosen.units)

    def _drafted(self, chosen: Chosen) -> Sending:
        for queued in chosen.units:
            queued.unit.sent()
        return Sending(
            Draft(group_id(self._me, next(self._numbers)), chosen.entries),
            self._heads,
            self._tail,
            self._others,
            self._stream,
            self._subjects.groups,
            self._purged,
            min(queued.parts_at for queued in chosen.units),
            self._timeout_s,
        )

    async def _send(
        self, group: Sending, units: Sequence[Queued], first: int | Exception | None = None
    ) -> StoredMessage | None:
        """Store a group of these units, or say how they ended. `first`: how the first try has ended, if it was made."""
        self._group = group
        outcome = await group.outcome(first)
        if isinstance(outcome, Conflict):
            self.refusals += 1
            for queued in units:
                if not queued.elsewhere:
                    queued.unit.refused()
            self._waiting.extendleft(reversed(units))
            return None
        if isinstance(outcome, Exception):
            _end_all(units, outcome)
            return None
        self._on_stored(units, outcome)
        return outcome.message

    def _on_stored(self, units: Sequence[Queued], written: Written) -> None:
        # The first line that matters, the publish ack: only now is the group on the log's disk, and only now do its
        # writers return. Returning earlier would acknowledge what a crash can still lose.
        self.groups += 1
        self._large.unanswered = 0
        self._lone = self._lone + 1 if len(units) == 1 and not self._waiting else 0
        self._heads.observe(written.group, stored_bytes(written.group, written.message))
        self._tail.note(written)
        self._stored()
        number = -1
        for queued in units:
            number += len(queued.messages)
            end_one(queued.unit, place(written.group.seq, max(number, 0)))

    def _choose(self, units: Sequence[Queued]) -> Chosen:
        """Do as `choose`, without units whose parts may be gone by now."""
        for queued in [queued for queued in units if queued.elsewhere]:
            if old := parts_too_old(self._stream, queued.parts_at):
                _end_all([queued], old)
                units = [other for other in units if other is not queued]
        return choose(units, self._heads, self._subjects)


def _end_all(units: Iterable[Queued], error: Exception) -> None:
    end_all([queued.unit for queued in units], error)


def _raise(error: BaseException) -> None:
    raise error
