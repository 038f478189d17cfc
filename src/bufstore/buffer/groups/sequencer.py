"""The writer of groups: one group on its way, which follows the last group that this process has seen.

A group is stored only if nobody stored one since (the expected last sequence of the groups' subject). So its writer
knew every entry before it, and what it checked against these still holds: the log contains only what counts. Units that
come while a group is on its way make the next one. A second group on its way would be wrong: sent after one that loses,
it could still be stored, although it was drafted on the loser.

If another writer was first, the units whose threads were touched meanwhile end with Conflict, and the rest goes with
the next group. What the others wrote is heard (`bufstore.buffer.groups.others`), or read. If no answer comes, what
follows the predecessor decides. If it is ours, it is stored. If it is another's, ours can never be stored. If nothing
follows, the same bytes go out again with the same expectation, so at most one copy is stored. Until the
outcome is known, nothing else is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
from tenacity import AsyncRetrying, retry_if_result, wait_random_exponential

from bufstore import elapsed
from bufstore.buffer.groups.choosing import BYTES_MAX, Chosen, Queued, choose, count_fitting, too_large, unfit
from bufstore.buffer.groups.group import HEAD_BYTES_MAX, Draft, hash_of, size_of, stored_bytes
from bufstore.buffer.groups.heads import Heads
from bufstore.buffer.groups.others import Others, group_id
from bufstore.buffer.groups.oversize import parts_of, reference
from bufstore.buffer.groups.stream import GroupsInStream
from bufstore.buffer.groups.tail import Tail, Written
from bufstore.buffer.places import ENTRIES_MAX, place
from bufstore.buffer.subjects import Subjects
from bufstore.config import large_bytes_max
from bufstore.errors import BufstoreError, Closed, LogFull, LogUnavailable, Unavailable
from bufstore.failpoints import Failpoint, reach
from bufstore.jetstream.errors import MessageTooLarge
from bufstore.jetstream.group_commit import AppendUnit, Awaited, end_all, end_one, unanswered, unsent
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, StoredMessage
from bufstore.log_lines import LogLines
from bufstore.tasks import end, interrupted, spawn

_log = LogLines(__name__)

#: For how long a writer that others have overtaken on a thread of theirs expects to be overtaken again.
_SHARED_S = 1.0
#: The seconds until the task that writes is begun anew after somebody has cancelled it, or it has failed.
_AGAIN_S = 0.5
#: Longest pause between two tries while the outcome of a group is not known.
_PAUSE_MAX_S = 0.2
_PARTS_OLD = "the parts of a large entry were stored too long ago"


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
        self._sending: list[Queued] = []
        self._task: asyncio.Task[None] | None = None
        #: Units whose parts are being stored, one at a time.
        self._large: list[Queued] = []
        self._one_large = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        #: How many bytes of entries fit into one message of the server, as it was last known.
        self.room = BYTES_MAX - HEAD_BYTES_MAX
        #: The place below which the log may be purged.
        self._purged = 0
        #: The numbers that tell this writer's groups from others', and from each other.
        self._me = int.from_bytes(os.urandom(4)) >> 1 or 1
        self._numbers = itertools.count(int.from_bytes(os.urandom(4)))
        self._others = Others(stream, subjects, self._me, self._heard, lambda: heads.seen, self._is_wanting)
        #: When another writer was found to write to the same threads; None: not lately.
        self._overtaken_at: float | None = None
        #: How often the group on its way was sent without an answer, and how many parts of large entries in a row.
        self._unanswered = self._unanswered_parts = 0
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
        await end(*self._tasks, self._task)
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
            self._store_parts(msgspec.structs.replace(queued, elsewhere=elsewhere))
        else:
            asyncio.get_running_loop().call_soon(_end_all, [queued], unfit(messages, self.room))

    def _queue(self, queued: Queued) -> None:
        # Looked at only while others write to the same threads: it costs.
        if self._overtaken_at is not None and self._is_overtaken(queued):
            asyncio.get_running_loop().call_soon(_end_all, [queued], Conflict("another entry was stored first"))
            return
        self._waiting.append(queued)
        if self._task is None:
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

    def _look_at_limit(self) -> None:
        with contextlib.suppress(Unavailable):  # not connected, or closed: the write will say so
            self.room = self._stream.message_bytes_max - HEAD_BYTES_MAX

    @property
    def oldest(self) -> int | None:
        """The last group that was seen when the oldest unit came that is not stored; None if there is no such unit."""
        # A large unit is queued when its parts are stored, behind others that came later.
        return min((q.seen for q in (*self._sending, *self._waiting, *self._large)), default=None)

    @property
    def trouble(self) -> str:
        """See `bufstore.buffer.ports.log.Log`."""
        try:
            self._stream.message_bytes_max  # noqa: B018 - it raises while the process is not connected
        except BufstoreError as e:
            return str(e)
        if max(self._unanswered, self._unanswered_parts) < 2:  # after one, the connection may have been lost
            return ""
        return "NATS does not answer writes; if its disk is full, free some space and restart nats-server"

    def _work_soon(self) -> None:
        """Begin one turn of the loop later: writers that were woken together have their next entries ready then."""
        if self._loop is not None and self._task is None:
            self._task = spawn(self._work(), name="bufstore-groups")
            self._task.add_done_callback(self._worked)

    async def _work(self) -> None:
        while self._waiting:
            await self._others.go_first()
            if (message := await self._guarded(self._take())) is not None:
                await self._others.wrote(message, whole=self._are_shared())

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._task = None
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

    # --- entries that are too large for a group --------------------------------------------------------------

    def _store_parts(self, queued: Queued) -> None:
        self._large.append(queued)
        task = spawn(self._with_parts(queued), name="bufstore-parts", among=self._tasks)
        task.add_done_callback(partial(self._parts_ended, queued))

    def _parts_ended(self, queued: Queued, task: asyncio.Task[None]) -> None:
        self._large.remove(queued)
        if task.cancelled():  # perhaps before it began
            end_one(queued.unit, unsent(closed=self._closed))
        elif task.exception() is not None:  # of a signal's handler; the app may run the loop again
            end_one(queued.unit, AppendUnknown("a signal interrupted the write"))

    async def _with_parts(self, queued: Queued) -> None:
        """Store the parts of a unit's large entries, then queue the unit, which names them."""
        try:
            messages = list(queued.messages)
            async with self._one_large:
                # Parts that do not all fit would fill the log for everyone until they can be purged, and count for
                # nothing.
                used, limit = await self._stream.fill()
                size = sum(len(messages[number].body) for number in queued.elsewhere)
                if used + size > large_bytes_max(limit):
                    raise LogFull(f"the log has no room for a large entry of {size} bytes")
                parts_at = elapsed.now_s()
                if queued.unit.given_up:
                    end_one(queued.unit, Conflict("its caller gave up"))
                    return
                self._look_at_limit()
                queued.unit.sent()  # it goes on even when a write's time is over: begun anew, it would never end
                for number in queued.elsewhere:
                    payload = messages[number].body
                    parts = parts_of(self._subjects.parts, payload, self.room)
                    seqs = [await self._stream.publish(part, self._timeout_s) for part in parts]
                    messages[number] = msgspec.structs.replace(messages[number], body=reference(payload, seqs))
        except AppendUnknown as e:
            self._unanswered_parts += 1
            # Parts count for nothing without a group.
            end_one(queued.unit, LogUnavailable(f"a part of a large entry was not stored: {e}"))
        except BufstoreError as e:
            end_one(queued.unit, e)
        except Exception as e:
            # Never leave writers waiting until their deadlines.
            _log.exception(
                "the parts of a large entry could not be stored; the outcome of its write is unknown",
                extra={"action": "group_commit_error"},
            )
            end_one(queued.unit, AppendUnknown(f"unexpected {type(e).__name__}"))
        else:
            self._unanswered_parts = 0
            reach(Failpoint.PARTS_STORED)
            self._queue(
                msgspec.structs.replace(queued, messages=messages, size=sum(map(size_of, messages)), parts_at=parts_at)
            )

    async def _guarded(self, units: list[Queued]) -> StoredMessage | None:
        """Store the units, or say how they ended. Returns the message of the group that was stored."""
        self._sending = units
        try:
            return await self._store(units)
        except asyncio.CancelledError:
            _end_all(units, unanswered(closed=self._closed))
            raise
        except BufstoreError as e:  # the log could not be looked at, and nothing was sent
            _end_all(units, e)
        except Exception as e:
            # Never leave writers waiting until their deadlines.
            _log.exception(
                "a group could not be written; the outcome of its writes is unknown",
                extra={"action": "group_commit_error"},
            )
            _end_all(units, AppendUnknown(f"unexpected {type(e).__name__}"))
        except BaseException:  # of a signal's handler; the app may run the loop again
            _end_all(units, AppendUnknown("a signal interrupted the write"))
            raise
        finally:
            self._sending, self._unanswered = [], 0
        return None

    async def _store(self, units: list[Queued]) -> StoredMessage | None:
        if not self._heads.life:
            await self._tail.see_all()
        chosen = self._choose(units)
        if chosen.moved:
            self._overtaken_at = asyncio.get_running_loop().time()
            _end_all(chosen.moved, Conflict("another entry was stored first"))
        if not chosen.units:
            return None
        draft = Draft(group_id(self._me, next(self._numbers)), chosen.entries)
        for queued in chosen.units:
            queued.unit.sent()
        outcome = await self._send(draft, min(q.parts_at for q in chosen.units))
        if isinstance(outcome, Conflict):
            self.refusals += 1
            for queued in chosen.units:
                if not queued.elsewhere:
                    queued.unit.refused()
            self._waiting.extendleft(reversed(chosen.units))
            return None
        if isinstance(outcome, Exception):
            _end_all(chosen.units, outcome)
            return None
        self._on_stored(chosen.units, outcome)
        return outcome.message

    def _on_stored(self, units: Sequence[Queued], written: Written) -> None:
        # The first line that matters, the publish ack: only now is the group on the log's disk, and only now do its
        # writers return. Returning earlier would acknowledge what a crash can still lose.
        self.groups += 1
        self._unanswered_parts = 0
        self._heads.observe(written.group, stored_bytes(written.group, written.message))
        self._tail.note(written)
        self._stored()
        number = -1
        for queued in units:
            number += len(queued.messages)
            end_one(queued.unit, place(written.group.seq, max(number, 0)))

    def _choose(self, units: Sequence[Queued]) -> Chosen:
        """Do as `choose`, without units whose parts may be gone by now."""
        late = [queued for queued in units if queued.elsewhere and self._too_late(queued.parts_at)]
        if late:
            _end_all(late, LogUnavailable(_PARTS_OLD))
            units = [queued for queued in units if queued not in late]
        return choose(units, self._heads, self._subjects)

    def _too_late(self, parts_at: float) -> bool:
        # For so long, parts certainly stay in the log while no group names them.
        return elapsed.now_s() - parts_at > self._stream.windows.rely_s / 2

    async def _send(self, draft: Draft, parts_at: float) -> Written | Exception:
        """Store the group behind the last one. `parts_at`: when the first part that it names was stored.

        Returns Conflict when another group stands there, which this process has then seen; another error when nothing
        is stored, or AppendUnknown.
        """
        before, before_id = self._heads.seen, self._heads.seen_id
        purged = max(self._purged, self._heads.purged)
        header = draft.header(before_id, before, purged)
        message = Outgoing(self._subjects.groups, draft.body, header, before)
        unanswered = False

        def written(seq: int) -> Written:
            stored = StoredMessage(message.subject, seq, header, draft.body)
            return Written(draft.stored(seq, before_id, before, purged), stored)

        def is_gone() -> bool:
            """Whether it was found meanwhile that the log does not have what the group is to stand behind."""
            seen = self._heads.seen
            return seen < before or (seen == before and self._heads.seen_id != before_id)

        def gone() -> Exception:
            reason = "the group's predecessor is not in the log"
            return AppendUnknown(reason) if unanswered else Conflict(reason)

        async def once() -> Written | Exception | None:
            """Try once. None: look again."""
            nonlocal unanswered
            refused = too_large = False
            sent_at = asyncio.get_running_loop().time()
            try:
                if not self._tail.last_seen.confirmed:
                    await self._tail.confirm()
                    if is_gone():
                        return gone()
                    sent_at = asyncio.get_running_loop().time()
                if self._too_late(parts_at):  # what the group names may be gone, though the log may still take it
                    return AppendUnknown("its parts may be gone") if unanswered else LogUnavailable(_PARTS_OLD)
                seq = await self._stream.publish(message, self._timeout_s)
                self._others.took(asyncio.get_running_loop().time() - sent_at)
                return written(seq)
            except Conflict as e:
                self._others.took(asyncio.get_running_loop().time() - sent_at)
                if not unanswered and self._heads.seen > before:  # the faster group was heard before the refusal
                    return e
                refused = True  # else the first copy of our own group may have been faster
            except AppendUnknown:
                unanswered = True
                self._unanswered += 1
            except BufstoreError as e:
                if not unanswered:
                    return e
                too_large = isinstance(e, MessageTooLarge)
            try:
                await self._others.were_first()
                found = await self._tail.first_behind(before)
                if found is None and refused and not is_gone():
                    await self._tail.confirm()
            except (BufstoreError, AppendUnknown) as e:
                _log.info("the outcome of a group stays unknown: %s", e, extra={"action": "append_unknown"})
                return None
            if found is None and is_gone():
                return gone()
            if found is None and too_large:  # an earlier copy was not: it may still come, but this one never can
                return AppendUnknown("the server now accepts only smaller messages than when the group was first sent")
            if found is None:
                return AppendUnknown("its parts may be gone") if self._too_late(parts_at) else None
            if found.id == draft.id:
                return written(found.seq)
            if found.before != before and unanswered:
                return AppendUnknown("whatever followed the group's predecessor has been purged")
            return Conflict("another group was stored first")

        # Almost always the first try succeeds, and preparing retries costs more than drafting a small group.
        outcome = await once()
        if outcome is None:
            pause = wait_random_exponential(multiplier=0.005, max=_PAUSE_MAX_S)
            outcome = await AsyncRetrying(wait=pause, retry=retry_if_result(_is_none))(once)
            assert outcome is not None
        return outcome


def _end_all(units: Iterable[Queued], error: Exception) -> None:
    end_all([queued.unit for queued in units], error)


def _is_none(outcome: object) -> bool:
    return outcome is None
