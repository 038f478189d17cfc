"""A mailbox's bucket: reads that show every earlier write, writes of messages as neighbours, its room, its clock.

New dispatches are refused before the bucket is full, so that those that wait can leave it. Claims, ends, renewals and
sweeps write, too: in a full bucket nothing could be worked off, and nothing purged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from bufstore.elapsed import since_start_s
from bufstore.errors import LogFull, LogUnavailable, MalformedEntry
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.ensure import seconds
from bufstore.jetstream.fresh_reads import FreshReads
from bufstore.jetstream.group_commit import GroupCommit
from bufstore.jetstream.messages import AppendUnknown, BatchRefused, Conflict, Outgoing, StoredMessage
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subject_tokens import untoken
from bufstore.log_lines import LogLines
from bufstore.mailbox.decisions import clock_ahead, is_stale
from bufstore.mailbox.model import Dispatch, MailboxThread
from bufstore.mailbox.nats_keys import Keys
from bufstore.tasks import together

_log = LogLines(__name__)

#: Every step reads before it writes. The read takes less than this share of a group's time.
_LINGER = 0.3
#: One part in this many of the bucket is kept for what is there already.
_RESERVED = 8
#: Bytes that a message needs besides on its way through the mailbox: marks, a lease's entry, the thread's state.
_ON_ITS_WAY = 300
#: Bytes that a dispatch's record may grow by: names of its holder and worker, twice, and what is said of a lost lease.
#: Without them a dispatch could be enqueued and never claimed, and its thread would stand.
GROWS_BY = 8 << 10
#: At most one part in this many of what a server takes is kept for that.
_ROOM = 4
#: An instance looks again when it has added one part in this many of the reserve: so many instances do not overrun it.
_LOOKS = 16
#: How long a bucket that was found full is taken for full without another look.
_FULL_S = 0.2


class Bucket(FreshReads):
    """The base that all parts of a mailbox on NATS use."""

    def __init__(
        self, connection: Connection, stream: NatsStream, keys: Keys, timeout_s: float, max_bytes: int
    ) -> None:
        unused = keys.of("unused", "0")
        super().__init__(stream, timeout_s, unused)
        self.connection = connection
        self.keys = keys
        self.writes = GroupCommit(stream, linger=_LINGER)
        self._alone = asyncio.Lock()
        self._room = _Room(max_bytes, stream, unused, timeout_s)
        #: Sequences of messages that cannot be read and were logged.
        self._set_aside: set[int] = set()
        #: The server's clock minus ours, in seconds. No step of the wall clock moves ours, and it goes on while the
        #: machine is suspended: else claims would be born expired.
        self._offset_s = 0.0

    def now_ms(self) -> int:
        """Return the time by the server's clock, as near as is known."""
        return round(1000 * (since_start_s() + self._offset_s))

    def set_clock(self, info: dict[str, Any], asked_at: float) -> None:
        """Set the clock by `info`, for which the server was asked at `asked_at` (`since_start_s`)."""
        self._offset_s = clock_ahead(self._offset_s, seconds(info["ts"]), asked_at, since_start_s())

    async def put(self, messages: Sequence[Outgoing], room: int = 0, *, patient: bool = True) -> int:
        """Write all or none, as neighbours; return the last sequence. `patient`: try for a while in a full bucket.

        Raises Conflict, AppendUnknown, LogFull, and TooLarge for what the server would not take `room` bytes larger.
        """
        room = min(room, self.stream.message_bytes_max // _ROOM)
        for message in messages:
            self.stream.check_size(message.body, room)
        try:
            last = await self.writes.submit(messages)
        except LogFull:
            if not patient:
                raise
            # Other instances' groups on their way hold room. It is free again a moment later, whatever becomes of them.
            last = await AsyncRetrying(
                retry=retry_if_exception_type(LogFull),
                stop=stop_after_delay(self.timeout_s),
                wait=wait_random_exponential(multiplier=0.01, max=0.1),
                reraise=True,
            )(self._put_alone, messages)
        self.wrote(messages, last)
        return last

    async def put_new(self, messages: Sequence[Outgoing]) -> int:
        """Write the messages of something new as `put` does, if there is room for it."""
        async with self._room.taken(messages):
            return await self.put(messages, GROWS_BY)

    async def _put_alone(self, messages: Sequence[Outgoing]) -> int:
        # A step makes room when it is done, but needs some before: many at once need more than one after the other.
        async with self._alone:
            try:
                return await self.stream.publish_batch(messages, self.timeout_s)
            except BatchRefused as e:
                raise LogUnavailable(f"the server accepts no batch now: {e}") from None

    async def put_each(
        self, messages: Iterable[Outgoing], *, patient: bool = True
    ) -> Mapping[str, Conflict | AppendUnknown]:
        """Write each by itself, as `put` does; return the errors of those not surely written, by subject.

        None is on its way afterwards.
        """
        failed: dict[str, Conflict | AppendUnknown] = {}

        async def put(message: Outgoing) -> None:
            try:
                await self.put([message], patient=patient)
            except (Conflict, AppendUnknown) as e:
                failed[message.subject] = e

        await together(map(put, messages))
        return failed

    def dispatches(self, found: Iterable[StoredMessage]) -> Iterator[tuple[Dispatch, StoredMessage]]:
        """Yield the readable dispatches. Other messages are set aside: they stay, and nothing waits for them."""
        for message in found:
            try:
                if message.body:
                    yield self.keys.dispatch(message), message
            except MalformedEntry as e:
                if message.seq not in self._set_aside:
                    _log.warning(
                        "%s; the message is skipped and stays where it is", e, extra={"action": "mailbox_foreign"}
                    )
                self._set_aside = {message.seq, *islice(self._set_aside, 1000)}

    async def states(self, thread_ids: Iterable[str]) -> dict[str, MailboxThread]:
        """Return the threads' states as any copy has them; for a state that cannot be read, the empty one."""
        states = {t: MailboxThread(thread_id=t) for t in thread_ids}
        return states | dict(self.readable((await self.copy(list(map(self.keys.thread, states)))).values()))

    def readable(self, found: Iterable[StoredMessage]) -> Iterator[tuple[str, MailboxThread]]:
        """Yield the states that can be read, with their threads' ids."""
        for message in found:
            with suppress(MalformedEntry):
                thread_id = untoken(message.subject.rpartition(".")[2])
                yield thread_id, self.keys.state(message, thread_id)

    async def waiting(self, found: Iterable[StoredMessage]) -> list[Dispatch]:
        """Return the dispatches that wait among messages under ``q`` and ``r``: not the superseded ones, and not those
        that a killed server brought back although they have ended or are claimed."""
        queued = {(d.thread_id, d.dispatch_id): d for d, _ in self.dispatches(found)}
        states = await self.states({thread_id for thread_id, _ in queued})
        ended = await self.copy([self.keys.ended(d) for d in queued.values()])
        claimed = {(t, s.active.dispatch_id) for t, s in states.items() if s.active is not None}
        waiting = [d for key, d in queued.items() if key not in claimed and self.keys.ended(d) not in ended]
        return [d for d in waiting if not is_stale(d, states[d.thread_id])]


class _Room:
    """The room in a bucket of `limit` bytes (-1: no limit)."""

    def __init__(self, limit: int, stream: NatsStream, unused: str, timeout_s: float) -> None:
        """`unused`: a subject that never has a message."""
        limit = limit if limit >= 0 else 1 << 62
        self._most, self._step = limit - limit // _RESERVED, limit // (_RESERVED * _LOOKS)
        self._stream, self._unused, self._timeout_s = stream, unused, timeout_s
        self._known = float("inf")
        #: Bytes written since `_known` was read, and bytes on their way.
        self._added = self._flying = 0
        self._asking = asyncio.Lock()
        self._full_until = 0.0

    @asynccontextmanager
    async def taken(self, messages: Sequence[Outgoing]) -> AsyncIterator[None]:
        """Reserve room for these new messages, which the block writes. Raises LogFull when there is none."""
        size = sum(len(m.subject) + len(m.body) + _ON_ITS_WAY for m in messages)
        async with self._asking:
            if self._added > self._step or self._is_full(size):
                await self._look()
        if self._is_full(size):
            self._full_until = time.monotonic() + _FULL_S
            raise LogFull(
                f"the mailbox needs {self._known} bytes for its present contents and accepts new dispatches only up to "
                f"{self._most}: the rest of max_bytes is reserved for finishing queued work. "
                "Purge finished dispatches, or raise max_bytes."
            )
        self._flying += size
        try:
            yield
        finally:
            self._flying -= size
            self._added += size

    def _is_full(self, size: int) -> bool:
        return self._known + self._added + self._flying + size > self._most

    async def _look(self) -> None:
        if time.monotonic() >= self._full_until:
            before = self._added
            if self._stream.replicated:  # a leader that the others have left knows of nothing since
                await self._stream.prove(self._unused, self._timeout_s)
            state = (await self._stream.info())["state"]
            self._known = state["bytes"] + state["messages"] * _ON_ITS_WAY
            self._added -= before
