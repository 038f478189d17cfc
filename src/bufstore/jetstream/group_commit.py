"""Group commit: many writers, few fsyncs.

A single server with ``sync_interval: always`` syncs once per message, pipelined or not; an atomic batch costs about
four syncs whatever its size. So while one group is being stored the next one fills: a lone write goes out at once as
a plain message, several as parallel plain messages or as one atomic batch, whichever is faster here (`publish_mode`).

One group is on its way at a time: a server stores batches one after another and answers when it has nothing left to
do, so a second group would only delay the answer to the first. The group that fills meanwhile is sent the moment the
answer is there, before the writers of the first group learn of it, so they prepare their next entries while the server
works. To reach this rhythm from the start, only half of many waiting units go with the first group.

Writers that read before they write again come too late for that, and would end up as two crowds that take turns, half a
group each. For them a group may *linger* (like Postgres' ``commit_delay``): until as many units wait as there are
writers, but at most for a fraction of the last group's time.

A *unit* is what must be stored as neighbours or not at all (the messages of a mailbox's step, say). Units of different
writers share a batch; when the server rejects it, it names no culprit: the units whose subject has moved are found with
one read and fail with Conflict, the others go out again, in a batch of their own. A unit is never split.

After a lost answer every unit of the group fails with AppendUnknown: its writer, which knows what it expected, must
find out whether it is stored.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from bufstore.errors import BufstoreError, Closed, LogUnavailable
from bufstore.jetstream.errors import MessageTooLarge
from bufstore.jetstream.messages import (
    BATCH_MESSAGES_MAX,
    HEADER_BYTES_MAX,
    AppendUnknown,
    BatchRefused,
    Conflict,
    Outgoing,
)
from bufstore.jetstream.publish_mode import PublishModes
from bufstore.log_lines import LogLines
from bufstore.tasks import end, interrupted, settle, spawn

if TYPE_CHECKING:
    from bufstore.jetstream.stream import NatsStream

_log = LogLines(__name__)

_BATCH_BYTES_MAX = 16 << 20
#: From this many waiting units on, they go out in two groups.
_SPLIT_FROM = 96
#: If the last group had this many times as many units as wait now, they wait for what its writers write next.
_SMALL = 4
#: How long the server may take for one group, at most, in seconds.
_TIMEOUT_S = 5.0


# Not `gc=False`: an error's frames may lead back to the unit that has the error, a cycle that only the collector frees.
class AppendUnit(msgspec.Struct, eq=False):
    """Messages that are stored as neighbours or not at all. Subclasses say what happens at the end."""

    messages: Sequence[Outgoing]
    #: The thread of all messages; None when it is only known from their subjects.
    thread_id: str | None = None
    #: The bytes that the messages take where they go, if whoever made them has summed them up; else 0.
    size: int = 0
    #: Whether `ended` was called.
    over: bool = False

    def __repr__(self) -> str:
        # Leave out the contents: asyncio shows the arguments of a callback that fails.
        return f"{type(self).__name__}(thread_id={self.thread_id!r}, {len(self.messages)} messages)"

    @property
    def given_up(self) -> bool:
        """Whether no caller waits for the unit, so that it need not be sent."""
        return False

    def sent(self) -> None:
        """Note that the unit goes out now: until `refused` or `ended`, it may be stored."""

    def refused(self) -> None:
        """Note that the unit is certainly not stored, and will be sent again."""

    def ended(self, outcome: int | Exception) -> None:
        """Note, once, the sequence of the unit's last message; or why it is not stored, or not known to be."""
        raise NotImplementedError


def _future() -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


class Awaited(AppendUnit, kw_only=True, eq=False):
    """A unit whose end is a future: see `GroupCommit.submit`."""

    stored: asyncio.Future[int] = msgspec.field(default_factory=_future)

    @property
    def given_up(self) -> bool:
        return self.stored.cancelled()

    def ended(self, outcome: int | Exception) -> None:
        settle(self.stored, outcome)
        if not self.stored.cancelled():
            self.stored.exception()  # a writer that is gone will not retrieve it


class GroupCommit:
    """Writes units to one stream, one group at a time."""

    def __init__(self, stream: NatsStream, *, linger: float = 0.0) -> None:
        """`linger`: a fraction of a group's time, 0 to 1."""
        self._stream = stream
        self._shapes = PublishModes()
        self._waiting: deque[AppendUnit] = deque()
        #: Groups on their way; more than one only while the rest of a group goes out again.
        self._tasks: set[asyncio.Task[None]] = set()
        #: The group that the next one waits for; None when the next one may go.
        self._ahead: list[AppendUnit] | None = None
        self._linger = linger
        #: How many units were on their way or waiting when the last group ended, and until when to wait for them.
        self._writers = 0
        self._linger_until = self._sent_at = 0.0
        self._lingering: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def start(self) -> None:
        """Begin to send; needs a running event loop."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._look_soon()

    async def aclose(self) -> None:
        """Stop. Units that still wait fail with Closed; units on their way fail with AppendUnknown."""
        self._closed = True
        self._stop_lingering()
        await end(*self._tasks)
        waiting, self._waiting = self._waiting, deque()
        end_all(waiting, unsent(closed=True))

    def submit(self, messages: Sequence[Outgoing]) -> asyncio.Future[int]:
        """Queue a unit. The future gives the sequence of its last message once it is durable.

        It fails with Conflict, LogFull, LogUnavailable (nothing stored), or AppendUnknown. Cancelling the future
        takes the unit back if it was not sent yet.
        """
        unit = Awaited(messages)
        if self._closed:
            end_one(unit, Closed("the store is closed"))
        else:
            self._waiting.append(unit)
            if self._ahead is None and not self._lingers():
                self._look_soon()
        return unit.stored

    def _lingers(self) -> bool:
        """Return whether to wait for more units; if so, the queue is looked at when the time to linger is over."""
        if self._loop is None or not 0 < len(self._waiting) < self._writers:
            self._stop_lingering()
            return False
        if self._lingering is None and self._loop.time() < self._linger_until:
            self._lingering = self._loop.call_at(self._linger_until, self._linger_over)
        return self._lingering is not None

    def _linger_over(self) -> None:
        self._lingering = None
        self._look()

    def _stop_lingering(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None

    def _look_soon(self) -> None:
        """Look at the queue a turn of the loop later: writers that woke together have their next entries ready then."""
        if self._loop is not None:
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        if self._ahead is None and not self._closed:
            self._send(self._take(alone=True))

    def _send(self, group: list[AppendUnit]) -> None:
        if group:
            assert self._loop is not None
            task = spawn(self._guarded(group), name="bufstore-group")
            self._tasks.add(task)
            task.add_done_callback(partial(self._sent, group))
            self._ahead, self._sent_at = group, self._now()

    def _sent(self, units: list[AppendUnit], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # perhaps before it began; then it could tell nobody
            end_all(units, unsent(closed=self._closed))
        elif interrupted(task):  # wherever it was
            end_all(units, AppendUnknown("a signal interrupted the write"))
        self._go_on(units)  # if that has not been done: nothing may wait for it any more

    def _go_on(self, group: list[AppendUnit]) -> None:
        """Send what waits, now that nothing need wait for `group`."""
        if self._ahead is not group:
            return
        self._ahead = None
        if self._linger:
            now = self._now()
            self._writers = len(group) + len(self._waiting)
            self._linger_until = now + self._linger * (now - self._sent_at)
        if self._closed or not self._waiting or self._lingers():
            return
        if len(self._waiting) * _SMALL < len(group):
            self._look_soon()
        else:
            self._send(self._take(alone=False))

    async def _guarded(self, group: list[AppendUnit]) -> None:
        try:
            await self._store(group)
        except asyncio.CancelledError:
            end_all(group, unanswered(closed=self._closed))
            raise
        except Exception as e:
            # Never leave writers waiting until their deadlines.
            _log.exception(
                "group commit failed; the outcome of its writes is unknown", extra={"action": "group_commit_error"}
            )
            end_all(group, AppendUnknown(f"unexpected {type(e).__name__}"))
        finally:
            self._go_on(group)

    def _take(self, *, alone: bool) -> list[AppendUnit]:
        """Take the next group. `alone`: no group ended just now, so of many waiting units only half are taken."""
        room = BATCH_MESSAGES_MAX
        if alone and len(self._waiting) >= _SPLIT_FROM:
            room = min(room, len(self._waiting) // 2)
        group: list[AppendUnit] = []
        messages = size = 0
        waiting = self._waiting
        while waiting:
            unit = waiting[0]
            messages += len(unit.messages)
            for message in unit.messages:
                size += len(message.body) + HEADER_BYTES_MAX
            if group and (messages > room or size > _BATCH_BYTES_MAX):
                break
            waiting.popleft()
            if unit.given_up:
                messages -= len(unit.messages)
            else:
                group.append(unit)
        return group

    async def _store(self, group: list[AppendUnit]) -> None:
        units = group
        while units:
            messages = [message for unit in units for message in unit.messages]
            # In a row of plain messages, units of several messages would each be a batch of their own.
            if len(messages) == len(units) and not self._shapes.batched(len(messages)):
                await self._store_each(units)
                return
            began = self._now()
            try:
                seq = await self._stream.publish_batch(messages, _TIMEOUT_S)
            except Conflict:
                self._go_on(group)
                units = await self._without_moved(units)
                continue
            except (BatchRefused, MessageTooLarge) as e:  # single ones may go through
                _log.info("the server refused a batch: %s", e, extra={"action": "batch_refused"})
                await self._store_each(units)
                return
            except (AppendUnknown, BufstoreError) as e:
                end_all(units, e)
                return
            self._shapes.took(len(messages), True, self._now() - began)
            self._go_on(group)
            # Only now is the group on the server's disk, and only now do its writers return: returning earlier would
            # acknowledge what a crash can still lose.
            seq -= len(messages)
            for unit in units:
                seq += len(unit.messages)
                end_one(unit, seq)
            return

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    async def _store_each(self, units: list[AppendUnit]) -> None:
        single = [unit for unit in units if len(unit.messages) == 1]

        def ended(number: int, outcome: int | Exception) -> None:
            end_one(single[number], outcome)

        if len(units) == 1:
            await self._store_one(units[0])
            return
        began = self._now()
        messages = [unit.messages[0] for unit in single]
        try:
            await asyncio.gather(
                self._stream.publish_each(messages, _TIMEOUT_S, ended),
                *(self._store_one(unit) for unit in units if len(unit.messages) > 1),
            )
        except BufstoreError as e:
            end_all(single, e)
            return
        if len(single) == len(units):
            self._shapes.took(len(units), False, self._now() - began)

    async def _store_one(self, unit: AppendUnit) -> None:
        outcome: int | Exception
        try:
            if len(unit.messages) == 1:
                outcome = await self._stream.publish(unit.messages[0], _TIMEOUT_S)
            else:
                outcome = await self._stream.publish_batch(unit.messages, _TIMEOUT_S)
        except BatchRefused as e:
            # Its messages must be neighbours, so there is no other way to store them.
            outcome = LogUnavailable(f"the server accepts no batch now: {e}")
        except (Conflict, AppendUnknown, BufstoreError) as e:
            outcome = e
        end_one(unit, outcome)

    async def _without_moved(self, units: list[AppendUnit]) -> list[AppendUnit]:
        """Fail the units whose subject is not where they expect it; return the others."""
        about = {_about(m) for unit in units for m in unit.messages if m.expected is not None}
        try:
            found = await self._stream.last(list(about), _TIMEOUT_S)
        except BufstoreError:
            # Nothing is stored; each writer looks for itself.
            end_all(units, Conflict("a batch was rejected"))
            return []
        ends = {subject: message.seq for subject, message in found.items()}
        rest = []
        for unit in units:
            # Of two units with one subject, one may know where it is, and the other one not.
            moved = next((m for m in unit.messages if m.expected not in (None, ends.get(_about(m), 0))), None)
            if moved is not None:
                end_one(unit, Conflict("another entry was stored first", found.get(_about(moved))))
            else:
                rest.append(unit)
        if len(rest) == len(units):
            # The conflict was with a write in flight. Sent alone, each unit succeeds or meets its own conflict.
            await self._store_each(units)
            return []
        return rest


def _about(message: Outgoing) -> str:
    return message.expected_of or message.subject


def unsent(*, closed: bool) -> BufstoreError:
    """Return the error of a unit whose task was ended before it sent the unit, by a close or by somebody else."""
    if closed:
        return Closed("the store was closed before the entry was sent")
    return LogUnavailable("the task that writes was cancelled before the entry was sent; nothing was stored; retry")


def unanswered(*, closed: bool) -> AppendUnknown:
    """Return the error of a unit whose task was ended after it may have sent the unit."""
    ended = "the store was closed" if closed else "the task that writes was cancelled"
    return AppendUnknown(f"{ended} while the entry was on its way")


def end_all(units: Iterable[AppendUnit], error: Exception) -> None:
    """Tell all these units that they are not stored, or not known to be."""
    for unit in units:
        end_one(unit, error)


def end_one(unit: AppendUnit, outcome: int | Exception) -> None:
    """Tell a unit how it ended, unless it was told before."""
    if unit.over:
        return
    unit.over = True
    try:
        unit.ended(outcome)
    except Exception:
        # The other units of the group must learn of their end all the same.
        _log.exception(
            "a writer's callback failed on its answer; other writers go on", extra={"action": "group_commit_error"}
        )
