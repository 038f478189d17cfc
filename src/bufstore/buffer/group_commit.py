"""Group commit: many writers, few fsyncs.

A single server with ``sync_interval: always`` syncs once per message, pipelined or not; an atomic batch costs about
four syncs whatever its size. So while one group is being stored the next one fills: a lone write goes out at once as
a plain message, few as parallel plain messages, many as one atomic batch.

A *unit* is what must be stored as neighbours or not at all (one thread's entries, the chunks of an entry). Units of
different writers share a batch; when the server rejects it, it names no culprit: the units whose subject has moved
are found with one read and fail with Conflict, the others go out again, in a batch of their own. A unit is never split.

After a lost answer every unit of the group fails with AppendUnknown: whether it is stored is for its writer to
find out, who knows what it expected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence

from bufstore.buffer.entry import HEADER_BYTES_MAX
from bufstore.buffer.ports import AppendUnknown, BatchRefused, Conflict, Outgoing, Stream
from bufstore.errors import BufstoreError, Closed, LogUnavailable

_log = logging.getLogger(__name__)

#: The server's limit for an atomic batch.
BATCH_MESSAGES_MAX = 1000
_BATCH_BYTES_MAX = 16 << 20
#: Below this many messages parallel plain writes are faster than a batch (its floor is some syncs).
_BATCH_FROM = 6
#: So many groups may be on their way at once.
_GROUPS_MAX = 2
#: From this many waiting units on, two groups are made of them.
_SPLIT_FROM = 128
#: How long the server may take for one group, at most.
_GROUP_TIMEOUT_S = 5.0


class _Unit:
    __slots__ = ("messages", "size", "stored")

    def __init__(self, messages: Sequence[Outgoing]) -> None:
        self.messages = messages
        self.size = sum(len(m.body) for m in messages) + HEADER_BYTES_MAX * len(messages)
        #: The last sequence, or the reason.
        self.stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.stored.done():
            self.stored.set_exception(error)

    def done(self, seq: int) -> None:
        if not self.stored.done():
            self.stored.set_result(seq)


class GroupCommit:
    """Writes units to one stream; one or two groups are on their way at a time."""

    def __init__(self, stream: Stream, *, timeout_s: float = _GROUP_TIMEOUT_S) -> None:
        """`timeout_s`: how long an answer is waited for, at most."""
        self._stream = stream
        self._timeout_s = min(timeout_s, _GROUP_TIMEOUT_S)
        self._waiting: deque[_Unit] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        """Begin to send; needs a running event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="bufstore-group-commit")

    async def aclose(self) -> None:
        """Stop. What is still waiting fails with Closed; what is on its way with AppendUnknown."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for unit in self._waiting:
            unit.fail(Closed("the store was closed before the entry was sent"))
        self._waiting.clear()

    def submit(self, messages: Sequence[Outgoing]) -> asyncio.Future[int]:
        """Queue a unit; the future gives the sequence of its last message, once it is durable.

        It fails with Conflict, LogFull, LogUnavailable (nothing stored), or AppendUnknown. Cancelling the future
        takes the unit back if it was not sent yet.
        """
        unit = _Unit(messages)
        if self._closed:
            unit.fail(Closed("the store is closed"))
        else:
            self._waiting.append(unit)
            self._wake.set()
        return unit.stored

    async def _run(self) -> None:
        on_their_way: set[asyncio.Task[None]] = set()
        try:
            while True:
                await self._wake.wait()
                # Writers that were woken by the last group have their next entry ready one turn of the loop later.
                await asyncio.sleep(0)
                on_their_way = {task for task in on_their_way if not task.done()}
                group = self._take(alone=not on_their_way)
                if not group:
                    self._wake.clear()
                    continue
                on_their_way.add(asyncio.create_task(self._guarded(group), name="bufstore-group"))
                if len(on_their_way) == _GROUPS_MAX:
                    await asyncio.wait(on_their_way, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in on_their_way:
                task.cancel()
            await asyncio.gather(*on_their_way, return_exceptions=True)

    async def _guarded(self, group: list[_Unit]) -> None:
        try:
            await self._store(group)
        except asyncio.CancelledError:
            _fail(group, AppendUnknown("the store was closed while the entry was on its way"))
            raise
        except Exception as e:
            # Never leave writers waiting until their deadlines.
            _log.exception("group commit failed", extra={"action": "group_commit_error"})
            _fail(group, AppendUnknown(f"unexpected {type(e).__name__}"))

    def _take(self, *, alone: bool) -> list[_Unit]:
        """The next group; half of what waits when that is much and nothing is on its way.

        Then one half is built while the server stores the other, and so on; a small group is not worth two syncs.
        """
        room = BATCH_MESSAGES_MAX
        if alone and len(self._waiting) >= _SPLIT_FROM:
            room = min(room, len(self._waiting) // 2)
        group: list[_Unit] = []
        messages = size = 0
        while self._waiting:
            unit = self._waiting[0]
            fits = messages + len(unit.messages) <= room and size + unit.size <= _BATCH_BYTES_MAX
            if group and not fits:
                break
            self._waiting.popleft()
            if not unit.stored.cancelled():
                group.append(unit)
                messages += len(unit.messages)
                size += unit.size
        return group

    async def _store(self, group: list[_Unit]) -> None:
        if sum(len(u.messages) for u in group) < _BATCH_FROM:
            await self._store_each(group)
            return
        while group:
            try:
                seq = await self._stream.publish_batch([m for u in group for m in u.messages], self._timeout_s)
            except Conflict:
                group = await self._without_moved(group)
                continue
            except BatchRefused as e:
                _log.info("no batch: %s", e, extra={"action": "batch_refused"})
                await self._store_each(group)
                return
            except (AppendUnknown, BufstoreError) as e:
                _fail(group, e)
                return
            # The first line that matters, the publish ack: only now is the group on the log's disk, and only now
            # do its writers return. Returning earlier would acknowledge what a crash can still lose.
            for unit in reversed(group):
                unit.done(seq)
                seq -= len(unit.messages)
            return

    async def _store_each(self, group: list[_Unit]) -> None:
        async def store(unit: _Unit) -> None:
            try:
                if len(unit.messages) == 1:
                    seq = await self._stream.publish(unit.messages[0], self._timeout_s)
                else:
                    seq = await self._publish_unit(unit)
            except (Conflict, AppendUnknown, BufstoreError) as e:
                unit.fail(e)
            else:
                unit.done(seq)

        if len(group) == 1:
            await store(group[0])
        else:
            await asyncio.gather(*(store(unit) for unit in group))

    async def _publish_unit(self, unit: _Unit) -> int:
        try:
            return await self._stream.publish_batch(unit.messages, self._timeout_s)
        except BatchRefused as e:
            # Its messages must be neighbours, so there is no other way to store them.
            raise LogUnavailable(f"the server takes no batch now: {e}") from None

    async def _without_moved(self, group: list[_Unit]) -> list[_Unit]:
        """Fail the units whose subject is not where they expect it; the rest."""
        expected = {_about(m): m.expected for u in group for m in u.messages if m.expected is not None}
        try:
            found = await self._stream.last(list(expected), self._timeout_s)
        except BufstoreError:
            # Nothing is stored; let each writer look for itself.
            _fail(group, Conflict("a batch was rejected"))
            return []
        moved = {s for s, seq in expected.items() if (found[s].seq if s in found else 0) != seq}
        if not moved:
            # The conflict was with a write in flight. Alone each will succeed or meet its own conflict.
            await self._store_each(group)
            return []
        rest = []
        for unit in group:
            if any(m.expected is not None and _about(m) in moved for m in unit.messages):
                unit.fail(Conflict("the subject has moved"))
            else:
                rest.append(unit)
        return rest


def _about(message: Outgoing) -> str:
    return message.expected_of or message.subject


def _fail(group: list[_Unit], error: Exception) -> None:
    for unit in group:
        unit.fail(error)
        with contextlib.suppress(asyncio.CancelledError):
            if unit.stored.done():
                unit.stored.exception()  # a writer that is gone will not look at it
