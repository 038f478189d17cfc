"""The log in memory: a stream as the server keeps it, and one instance's view of it.

It keeps what a real log promises (expectations, positions by epoch, a limit that pushes back, feeds without a hole),
and simulates nothing of what can go wrong on the way to a real log.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import accumulate
from typing import Any

from bufstore.buffer.ports.log import UNALTERED, Altered
from bufstore.buffer.subjects import first_sequence
from bufstore.buffer.target import Target
from bufstore.buffer.windows import Windows
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import BufstoreError, Closed, ConfigDrift, LogFull, LogRolledBack, LogUnavailable
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, Part, StoredMessage
from bufstore.tasks import spawn


class MemoryStream:
    """The messages of one stream, for all its writers and readers."""

    def __init__(self, config: LogConfig, epoch: int = 0, target: Target | None = None) -> None:
        self.config = config
        self.target = target
        self.epoch = epoch
        self.windows = Windows.of(config)
        #: The positions that the stream remembers while it is out of service; None while it is in service.
        self.withdrawn: Sequence[int] | None = None
        self.end = first_sequence(epoch) - 1
        self.bytes = 0
        #: The messages, in order of their sequences.
        self.messages: list[StoredMessage] = []
        self._of_subject: dict[str, list[StoredMessage]] = {}
        self.feeds: list[MemoryFeed] = []
        self.listeners: list[MemoryListener] = []

    def store(self, messages: Sequence[Outgoing]) -> int:
        """Check every expectation against what is there, then store all messages or none; return the last sequence.

        Raises Conflict, LogFull.
        """
        seen: set[str] = set()
        for message in messages:
            about = message.expected_of or message.subject
            if message.expected is not None and (about in seen or self.last_of(about) != message.expected):
                raise Conflict("wrong last sequence")
            seen.add(message.subject)
        size = sum(_size(m.subject, m.header, m.body) for m in messages)
        if self.bytes + size > self.config.max_bytes:
            raise LogFull("the log is full")
        for message in messages:
            self.end += 1
            stored = StoredMessage(message.subject, self.end, message.header, message.body)
            self.messages.append(stored)
            self._of_subject.setdefault(message.subject, []).append(stored)
        self.bytes += size
        for feed in self.feeds:
            feed.wake()
        return self.end

    def last_of(self, subject: str) -> int:
        """Return the last sequence of the subject; 0 for none."""
        found = self._of_subject.get(subject)
        return found[-1].seq if found else 0

    def last(self, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        """Return the last message of each subject; subjects that have none are left out."""
        return {s: self._of_subject[s][-1] for s in subjects if s in self._of_subject}

    def after(self, subject: str, seq: int) -> list[StoredMessage]:
        """Return the subject's messages above a sequence, in order."""
        messages = self._of_subject.get(subject, [])
        return messages[_behind(messages, seq) :]

    def purge(self, below: int) -> None:
        """Remove the messages below a sequence."""
        self._keep([m for m in self.messages if m.seq >= below])

    def remove(self, seq: int) -> None:
        """Remove one message."""
        self._keep([m for m in self.messages if m.seq != seq])

    def _keep(self, kept: list[StoredMessage]) -> None:
        self.messages, self._of_subject = kept, {}
        for message in kept:
            self._of_subject.setdefault(message.subject, []).append(message)
        self.bytes = sum(_size(m.subject, m.header, m.body) for m in kept)


class MemoryFeed:
    """See `bufstore.buffer.groups.delivery.StreamFeed`."""

    def __init__(
        self, stream: MemoryStream, subject: str, start: int, wake: Callable[[], None], messages_max: int
    ) -> None:
        self.lost: str | None = None
        self.wake = wake
        self._stream, self._subject = stream, subject
        #: The last sequence that was delivered, or was not to be delivered.
        self._delivered = start - 1
        self._messages_max = messages_max
        #: What is not acknowledged.
        self._held: deque[int] = deque()

    def take(self) -> list[StoredMessage]:
        if self.lost is not None:
            return []
        room = self._messages_max - len(self._held)
        found = self._stream.after(self._subject, self._delivered)[: max(room, 0)]
        if found:
            self._delivered = found[-1].seq
            self._held.extend(m.seq for m in found)
        return found

    @property
    def crowded(self) -> bool:
        return 2 * len(self._held) >= self._messages_max

    async def ack(self, seq: int) -> None:
        while self._held and self._held[0] <= seq:
            self._held.popleft()
        self.wake()

    async def close(self) -> None:
        self.lose("closed")

    def lose(self, reason: str) -> None:
        """Deliver no more."""
        if self.lost is None:
            self.lost = reason
            with contextlib.suppress(ValueError):
                self._stream.feeds.remove(self)
            self.wake()


class MemoryListener:
    """See `bufstore.buffer.groups.others.Listening`."""

    lost = False

    def __init__(self, stream: MemoryStream, subject: str, heard: Callable[[bytes], None]) -> None:
        self._stream, self.subject, self.heard = stream, subject, heard
        stream.listeners.append(self)

    async def close(self) -> None:
        with contextlib.suppress(ValueError):
            self._stream.listeners.remove(self)


class MemoryPosted:
    """See `bufstore.buffer.groups.stream.OnItsWay`."""

    def __init__(self, publish: Coroutine[Any, Any, int], ended: Callable[[int | Exception], None]) -> None:
        self._ended: Callable[[int | Exception], None] | None = ended
        self._task = spawn(publish)
        self._task.add_done_callback(self._over)

    def cancel(self) -> None:
        self._ended = None
        self._task.cancel()

    def _over(self, task: asyncio.Task[int]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._ended is None:
            return
        if task.cancelled() or not isinstance(error, Exception | None):
            self._ended(AppendUnknown("the task that writes was cancelled or interrupted"))
        else:
            self._ended(task.result() if error is None else error)


class MemoryLog:
    """See `bufstore.buffer.groups.stream.GroupsInStream`. `streams`: the server's streams, by name."""

    def __init__(
        self, streams: dict[str, MemoryStream], config: BufferConfig, message_bytes_max: int = 1 << 20
    ) -> None:
        self.message_bytes_max = message_bytes_max
        self._streams = streams
        self._config = config
        self._feeds: list[MemoryFeed] = []
        #: The highest position that this instance knows to be in the log.
        self._highest = 0
        self._refused: LogRolledBack | None = None
        self._closed = False
        self.calls = 0
        #: The number of times that the instance has connected.
        self.connections = 1

    async def publish(self, message: Outgoing, timeout_s: float) -> int:
        return await self._write([message])

    posts = True

    def post(self, message: Outgoing, timeout_s: float, ended: Callable[[int | Exception], None]) -> MemoryPosted:
        return MemoryPosted(self.publish(message, timeout_s), ended)

    async def _write(self, messages: Sequence[Outgoing]) -> int:
        stream = await self._turn()
        if stream.withdrawn is not None:
            raise LogUnavailable(f"stream {self._config.log.stream} is out of service")
        return stream.store(messages)

    async def _turn(self) -> MemoryStream:
        """Return the stream, a turn of the event loop later: callers of a log must not count on being alone."""
        self.calls += 1
        await asyncio.sleep(0)
        stream = self._stream
        if stream is None:
            raise LogUnavailable(f"there is no stream {self._config.log.stream}")
        if stream.end < self._highest:
            self.refuse(LogRolledBack(f"the log ends at {stream.end}, this process has seen {self._highest} in it"))
        if self._refused is not None:
            raise LogRolledBack(self._refused.reason, self._refused.way_out)
        self._highest = stream.end
        return stream

    @property
    def _stream(self) -> MemoryStream | None:
        if self._closed:
            raise Closed("the store is closed")
        return self._streams.get(self._config.log.stream)

    async def last(self, subjects: Sequence[str], timeout_s: float) -> dict[str, StoredMessage]:
        return (await self._turn()).last(subjects)

    async def after(self, subject: str, seq: int, timeout_s: float, limit: int = 0) -> list[StoredMessage]:
        found = (await self._turn()).after(subject, seq)
        return found[:limit] if limit else found

    async def part(self, subject: str, seq: int, timeout_s: float, limit: int, bytes_max: int = 0) -> Part:
        found = await self.after(subject, seq, timeout_s)
        sizes = accumulate(_size(m.subject, m.header, m.body) for m in found[:limit])
        count = min(len(found), limit, 1 + sum(size < bytes_max for size in sizes) if bytes_max else limit)
        return Part(found[:count], len(found) - count)

    @property
    def generation_start(self) -> int:
        stream = self._stream
        return first_sequence(stream.epoch if stream is not None else 0)

    @property
    def altered(self) -> Altered:
        return UNALTERED

    @property
    def refused(self) -> LogRolledBack | None:
        return self._refused

    def refuse(self, why: LogRolledBack) -> None:
        self._refused = self._refused or why

    def vouched_by(self, mismatch: Callable[[], Awaitable[object]]) -> None:
        """Do nothing: the one server always knows, and what it showed stands."""

    async def epoch(self, *, checked: bool = True) -> int | None:
        stream, ours = self._stream, self._config.log
        if stream is None or not checked:
            return stream.epoch if stream is not None else None
        if stream.withdrawn is not None:
            raise LogRolledBack(f"a repair of stream {ours.stream} was begun and not finished")
        stream.windows.check(ours)
        theirs = dataclasses.replace(
            stream.config, failover_window_s=ours.failover_window_s, archive=ours.archive
        )  # the log itself says what these two are now
        if theirs != ours:
            raise ConfigDrift(
                f"stream {ours.stream}", "config", expected=ours, found=stream.config, way_out="Make them the same."
            )
        return stream.epoch

    @property
    def windows(self) -> Windows:
        stream = self._streams.get(self._config.log.stream)
        return stream.windows if stream is not None else Windows.of(self._config.log)

    async def set_windows(self, windows: Windows) -> None:
        (await self._turn()).windows = windows

    async def create(self, epoch: int, target: Target) -> None:
        self._streams.setdefault(self._config.log.stream, MemoryStream(self._config.log, epoch, target))

    @property
    def target(self) -> Target | None:
        stream = self._streams.get(self._config.log.stream)
        return stream.target if stream is not None else None

    async def bounds(self) -> tuple[int, int]:
        stream = await self._turn()
        return stream.messages[0].seq if stream.messages else stream.end + 1, stream.end

    async def withdraw(self, common: Sequence[int]) -> Sequence[int]:
        stream = await self._turn()
        if stream.withdrawn is None:
            stream.withdrawn = tuple(common)
        return stream.withdrawn

    async def remove(self) -> None:
        stream = self._streams.get(self._config.log.stream)
        if stream is None or stream.withdrawn is None:
            return
        del self._streams[self._config.log.stream]
        for feed in list(stream.feeds):
            feed.lose("the stream is gone")

    async def end(self, timeout_s: float) -> int:
        return (await self._turn()).end

    async def follow(self, name: str, subject: str, start: int, wake: Callable[[], None]) -> MemoryFeed:
        """Deliver the messages of a subject from sequence `start` on. `name` belongs to this follower alone."""
        stream = await self._turn()
        feed = MemoryFeed(stream, subject, start, wake, self._config.flush_max_entries)
        stream.feeds.append(feed)
        self._feeds = [f for f in self._feeds if f.lost is None] + [feed]
        return feed

    async def listen(self, subject: str, heard: Callable[[bytes], None]) -> MemoryListener:
        """See `bufstore.buffer.groups.others.Announcements`."""
        return MemoryListener(await self._turn(), subject, heard)

    async def tell(self, subject: str, words: bytes) -> None:
        """Send `words` to all listeners on the subject, if the stream can be reached."""
        with contextlib.suppress(BufstoreError):
            for listener in list((await self._turn()).listeners):
                if listener.subject == subject:
                    listener.heard(words)

    async def purge_below(self, seq: int) -> None:
        """Remove everything below a sequence."""
        (await self._turn()).purge(seq)

    async def prove_leader(self, timeout_s: float) -> None:
        """Do nothing: the one server always leads."""

    async def barrier(self, timeout_s: float) -> int:
        """Return 0: the one server always leads."""
        return 0

    async def fresh_end(self, timeout_s: float) -> int:
        """Return 0: the one server always leads."""
        return 0

    @property
    def may_lag(self) -> bool:
        """False: the one server always answers."""
        return False

    async def fill(self) -> tuple[int, int]:
        stream = await self._turn()
        return stream.bytes, stream.config.max_bytes

    async def overwrite(self, seq: int) -> None:
        """Remove one message; do nothing if it is gone."""
        (await self._turn()).remove(seq)

    async def identity(self, seq: int) -> StoredMessage | None:
        messages = (await self._turn()).messages
        i = _behind(messages, seq - 1)
        return messages[i] if i < len(messages) and messages[i].seq == seq else None

    async def held(self, seq: int) -> StoredMessage | None:
        return await self.identity(seq)

    def close(self) -> None:
        """End this instance; the stream stays."""
        self._closed = True
        for feed in self._feeds:
            feed.lose("the connection was closed")


def _behind(messages: Sequence[StoredMessage], seq: int) -> int:
    return bisect_right(messages, seq, key=lambda m: m.seq)


def _size(subject: str, header: str | None, body: bytes) -> int:
    return len(subject) + len(header or "") + len(body) + 32
