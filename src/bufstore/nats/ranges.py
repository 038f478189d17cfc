"""Reads a range of the log without disturbing anybody: no acks, no durable consumer, the same answer each time.

For jobs that read what others write (`bufstore.spark`). Each read has an ephemeral consumer of its own, so the
flusher's are never touched. A read delivers the messages of the stream: groups of entries, parts of large entries, and
what stands beside them. The stream's own sequence identifies a message. A range ends at its last sequence, or when a
node that has got as far as the range has nothing left of it. Silence does not end it, nor does the answer of a node
that lags.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import nats.errors

from bufstore.buffer.subjects import Subjects, first_sequence
from bufstore.buffer.target import Target
from bufstore.config import LogConfig, NatsConfig
from bufstore.errors import LogFull, LogUnavailable, NoLog
from bufstore.jetstream.client import ListeningClient
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.errors import MessageMissing, StreamMissing
from bufstore.jetstream.headers import added, entry_header, status_of
from bufstore.jetstream.messages import AppendUnknown, Outgoing, StoredMessage
from bufstore.jetstream.pulls import numbers_of
from bufstore.jetstream.stream import NatsStream
from bufstore.nats.finding import log_config
from bufstore.nats.fresh_end import PROOF_S
from bufstore.nats.pull_sizes import PullSizes
from bufstore.nats.setup import epoch_of, target_of

_PULL = 4096
_PULL_BYTES = 8 << 20
_EXPIRES_S = 30
_HEARTBEAT_S = 1.5
#: Seconds without a heartbeat after which a consumer is asked no more: after a reconnect it has forgotten who asked.
_DEAF_S = 3 * _HEARTBEAT_S
#: Seconds in which nothing came, from any consumer, after which the log counts as unreadable.
_SILENCE_S = 10.0
#: Seconds before an interrupted read goes on.
_AGAIN_S = 0.1
#: For how many seconds a node that leads no more may tell of an older log (docs/adr/0028-one-answer-proves-a-read.md).
_OLD_LEADER_S = 20.0
#: Seconds after which a consumer whose reader is gone removes itself.
_INACTIVE_S = 60


class Read(msgspec.Struct, frozen=True, gc=False):
    """A message of the log, and when the server stored it."""

    message: StoredMessage
    stored_at_ns: int
    #: The bytes of the body, also where the body was not asked for.
    size: int


#: nats-server counts nanoseconds since 1970 in 64 bits: a later time wraps.
_LATEST_NS = 2**63 - 1


class LogState(msgspec.Struct, frozen=True):
    """The state of the log at one moment."""

    config: LogConfig
    #: When the stream was created. This tells it from another stream of the same name.
    created: str
    epoch: int
    #: The sequence of the first message that is (or will be) there, and the sequence behind the last one.
    first: int
    end: int
    #: The bytes that all its messages take.
    bytes: int
    #: Where the log is flushed to.
    target: Target

    def bytes_between(self, start: int, end: int) -> int:
        """Return about how many bytes the messages from `start` to before `end` take, if all are of the same size."""
        share = max(0, end - max(start, self.first)) / max(1, self.end - self.first)
        return round(self.bytes * min(1.0, share))

    @property
    def subjects(self) -> Subjects:
        """The log's subjects."""
        return Subjects(self.config.subject, self.config.partitions)


class LogReader:
    """Reads one log. Raises LogUnavailable, and ConfigError for a stream that bufstore did not create."""

    def __init__(self, config: NatsConfig, stream: str, bucket: str | None = None) -> None:
        self._bucket = bucket
        self._connection = Connection(config, "bufstore-reader")
        # As if there were several replicas: ask the leader for single messages, because only it knows what was purged.
        self._stream = NatsStream(self._connection, config.api, stream, 2)

    async def open(self) -> None:
        """Connect."""
        await self._connection.open()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._connection.aclose()

    async def look(self, *, fresh: bool = False, reached: int = 0) -> LogState:
        """Return the log as it is now. Raises NoLog when there is none.

        A node that led until it was cut off may say, for seconds, where the log ended before; also before a repair,
        which makes a stream whose numbers are higher.
        `fresh`: with all that was acknowledged before the call. On replicas this stores a message that proves the end.
        `reached`: the log ended here, or later, before (0: not known). On replicas a node that says otherwise is asked
        again while it may be such a node. Nothing is stored, for if the log did go back, it would hide that.
        """
        log = await self._look()
        if fresh and log.config.replicas > 1:
            end = await self._proven_end(log.subjects)
            if end <= first_sequence(log.epoch + 1):
                return msgspec.structs.replace(log, end=max(log.end, end))
            reached = end
        until = asyncio.get_running_loop().time() + _OLD_LEADER_S
        while log.end < reached and log.config.replicas > 1 and asyncio.get_running_loop().time() <= until:
            await asyncio.sleep(_AGAIN_S)
            log = await self._look()
        if fresh and log.end < reached:
            raise LogUnavailable("cannot read the log: no node shows the end that its leader has proved")
        return log

    async def _look(self) -> LogState:
        await self._connection.wait_up(_SILENCE_S)
        try:
            info = await self._stream.info()
        except StreamMissing:
            raise NoLog(self._stream.name) from None
        state, config = info["state"], info["config"]
        found = log_config(config, self._bucket)
        first = int(state["first_seq"]) or int(config.get("first_seq", 1))
        end = max(int(state["last_seq"]) + 1, first)
        target = target_of(config["metadata"])
        return LogState(found, info["created"], epoch_of(config), first, end, int(state["bytes"]), target)

    async def _proven_end(self, subjects: Subjects) -> int:
        """Return the sequence behind all that was acknowledged before the call. Raises LogUnavailable."""
        stream, proof = self._stream, Outgoing(subjects.proof, b"")
        try:
            try:
                return await stream.publish(proof, PROOF_S) + 1
            except LogFull:  # the last proof stays: it tells the holes below it from a loss
                await stream.api(f"STREAM.PURGE.{stream.name}", {"filter": subjects.proof, "keep": 1})
                return await stream.publish(proof, PROOF_S) + 1
        except LogFull:  # as for the store's fresh reads: one node proves that it leads, and a node answers
            await stream.prove(subjects.unused, PROOF_S)
            return int((await stream.info())["state"]["last_seq"]) + 1
        except AppendUnknown:
            raise LogUnavailable("cannot read the log: no node proves where it ends") from None

    async def message(self, sequence: int) -> StoredMessage | None:
        """Return the message with this sequence, which was in the log once; None if it is not there any more."""
        return await self._stream.held(sequence)

    async def first_of(self, subject: str, start: int) -> StoredMessage | None:
        """Return the subject's first message from this sequence on, from the leader; None if there is none."""
        found = await self._stream.after(subject, start - 1, _SILENCE_S, limit=1)
        return found[0] if found else None

    async def erased(self, start: int, *, fresh: bool = False) -> set[int]:
        """Return the sequences of messages that were erased: all from `start` on, and maybe some before.

        `fresh`: see `look`.
        """
        log, sequences = await self.look(fresh=fresh), set[int]()
        async with contextlib.aclosing(self.read(start, log.end, [log.subjects.erased])) as found:
            async for part in found:
                for read in part:
                    with contextlib.suppress(ValueError):  # a foreign message
                        sequences.update(int(number) for number in read.message.body.split(b","))
        return sequences

    async def at_time(self, time_ns: int, log: LogState) -> int:
        """Return the sequence of the first message that was stored at this time or later; the log's end if none was."""
        if time_ns > _LATEST_NS:
            return log.end
        # Without filters: with several, nats-server (2.15) goes on to the first message of a subject of which it has
        # none before this time, and passes over those of the others.
        found = self.read(0, log.end, (), headers_only=True, at_once=1, since_ns=max(time_ns, 0))
        async with contextlib.aclosing(found):
            async for part in found:
                return part[0].message.seq
        return log.end

    async def stored_at_ns(self, start: int, log: LogState) -> int | None:
        """Return when the first message from this sequence on was stored; None if there is none."""
        found = self.read(start, log.end, log.subjects.stored, headers_only=True, at_once=1)
        async with contextlib.aclosing(found):
            async for part in found:
                return part[0].stored_at_ns
        return None

    async def read(
        self,
        start: int,
        end: int,
        filters: Sequence[str],
        *,
        headers_only: bool = False,
        at_once: int = _PULL,
        since_ns: int | None = None,
        silence_s: float = _SILENCE_S,
    ) -> AsyncGenerator[list[Read]]:
        """Yield the messages of these subjects (none: of all) from sequence `start` to before `end`, in order, some at
        a time.

        `headers_only`: without bodies. `since_ns`: from the first message that was stored then or later, instead of
        from `start`. The caller may take any time before it asks for the next messages. Raises LogUnavailable after
        `silence_s` in which nothing came although there is more. The caller must notice whether the stream was made
        anew meanwhile.
        """
        at, clock = start, asyncio.get_running_loop().time
        came = clock()
        while at < end:
            try:
                found = self._consume(at, end, filters, headers_only=headers_only, at_once=at_once, since_ns=since_ns)
                async with contextlib.aclosing(found) as parts:
                    async for part in parts:
                        at, since_ns = part[-1].message.seq + 1, None
                        yield part
                        came = clock()
                return
            except StreamMissing:
                raise
            except LogUnavailable:
                # The consumer is gone after a long pause of the caller's, or not all servers of a cluster know it yet.
                if clock() - came > silence_s:
                    raise
                await asyncio.sleep(_AGAIN_S)

    async def _consume(
        self,
        start: int,
        end: int,
        filters: Sequence[str],
        *,
        headers_only: bool,
        at_once: int,
        since_ns: int | None,
    ) -> AsyncGenerator[list[Read]]:
        """Yield what `read` does, as far as one consumer gets."""
        client = await self._connection.wait_up(_SILENCE_S)
        name = f"range-{secrets.token_hex(8)}"
        config: dict[str, Any] = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": max(start, 1),
            "ack_policy": "none",
            "replay_policy": "instant",
            "inactive_threshold": _INACTIVE_S * 1_000_000_000,
            "mem_storage": True,
            "num_replicas": 1,
            "headers_only": headers_only,
            "filter_subjects": list(filters),
        }
        if since_ns is not None:
            del config["opt_start_seq"]
            config |= {"deliver_policy": "by_start_time", "opt_start_time": _rfc3339(since_ns)}
        stream = self._stream
        request = {"stream_name": stream.name, "config": config, "action": "create"}
        created = await stream.api(f"CONSUMER.CREATE.{stream.name}.{name}", request)
        if not created["num_pending"]:
            await self._check_not_behind(max(start, 1), end, filters, since_ns)
            return
        batch_max = created.get("config", {}).get("max_batch", 0)  # see `nats/feed.py`
        inbox = _Inbox(client, end, PullSizes(max(_PULL_BYTES, 2 * client.max_payload), batch_max))
        pull = {
            "expires": _EXPIRES_S * 1_000_000_000,
            "idle_heartbeat": int(_HEARTBEAT_S * 1_000_000_000),
        }
        subscription = None
        try:
            subscription = await client.listen(reply := client.new_inbox(), inbox.heard)
            while not inbox.done:
                # The next batch is requested before the last one is worked on, so at most two are in memory.
                room = min(at_once, end - inbox.position(start))
                if inbox.wanted <= room // 4:
                    size = inbox.sizes.next(room)
                    inbox.wanted += size["batch"]
                    await client.publish(stream.next_of(name), json.dumps(pull | size).encode(), reply=reply)
                if part := await inbox.take():
                    yield part
                elif inbox.idle and await self._nothing_left(name, inbox):
                    break
            if part := inbox.rest():
                yield part
            if not inbox.passed:
                await self._check_not_behind(inbox.position(start), end, filters, None if inbox.counter else since_ns)
        except nats.errors.Error as e:
            raise LogUnavailable(f"cannot read the log: {type(e).__name__}") from None
        finally:
            with contextlib.suppress(nats.errors.Error, LogUnavailable):
                if subscription is not None:
                    await subscription.unsubscribe()
                await stream.remove_consumer(name)

    async def _check_not_behind(self, start: int, end: int, filters: Sequence[str], since_ns: int | None) -> None:
        """Raise LogUnavailable unless nothing of the range is left, as its consumer's node says.

        The consumer has one replica. Its node delivers, long before it has caught up, what it has, and says that this
        is all. So one answer must show how far a node is, and what it has: of two nodes that both believe that they
        lead, the one that the others have left lacks what they have stored since. The next consumer, and the next
        answer, may come from another node.
        """
        if start >= end:
            return
        shown = await self._stream.shown([">"], 0 if since_ns is not None else start, _SILENCE_S)
        left = [m.seq for m in shown.messages if not filters or m.subject in filters]
        if shown.end < end - 1 or shown.more:
            # A log without any message does not say how far the node is, but where it begins.
            behind = (await self.look()).first < end
        elif since_ns is not None:
            behind = bool(left) and await self._stored_ns(max(left)) >= since_ns
        else:
            behind = bool(left)
        if behind:
            raise LogUnavailable("cannot read the log: a node that reads it has not caught up")

    async def _stored_ns(self, sequence: int) -> int:
        """Return when this message was stored. Raises LogUnavailable when it is not there."""
        try:
            answer = await self._stream.api(f"STREAM.MSG.GET.{self._stream.name}", {"seq": sequence})
        except MessageMissing:
            raise LogUnavailable(f"cannot read the log: message {sequence} is not there any more") from None
        return _ns_of(answer["message"]["time"])

    async def _nothing_left(self, consumer: str, inbox: _Inbox) -> bool:
        """Return whether all that the consumer has was received: then the rest of the range was removed."""
        inbox.idle = False
        info = await self._stream.consumer(consumer)
        return not info["num_pending"] and int(info["delivered"]["consumer_seq"]) == inbox.counter


class _Inbox:
    """The messages that a consumer has sent."""

    def __init__(self, client: ListeningClient, end: int, sizes: PullSizes) -> None:
        self._client = client
        self._end = end
        self.sizes = sizes
        self._arrived: list[Read] = []
        #: The number of messages that came.
        self.counter = 0
        self._last = 0
        self._something = asyncio.Event()
        self._trouble: str | None = None
        self.done = False
        #: Whether the end of the range has come, or something behind it.
        self.passed = False
        #: Whether the server said that it had nothing to send for a while.
        self.idle = False
        #: The number of messages that were asked for and have not come.
        self.wanted = 0

    def position(self, start: int) -> int:
        """Return the sequence that comes next."""
        return max(self._last + 1, start)

    def heard(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
        """Take a message, or a status."""
        self._something.set()
        if not reply:
            self._status(headers)
            return
        _, seq, counter, stored_at, pending = numbers_of(reply)
        if counter != self.counter + 1:
            self._trouble = f"delivery {self.counter + 1} is missing"
        self.counter = counter
        self._last = seq
        self.idle = False
        self.wanted -= 1
        if seq < self._end:
            size = added(headers, b"Nats-Msg-Size")
            message = StoredMessage(subject, seq, entry_header(headers), data)
            self._arrived.append(Read(message, stored_at, int(size) if size is not None else len(data)))
        self.passed = seq >= self._end - 1
        self.done = self.passed or not pending

    def _status(self, headers: bytes) -> None:
        status, description = status_of(headers)
        if status == "409" and "Bytes" in description:
            self.sizes.ended(self.counter)
        if status == "408" or (status == "409" and ("Bytes" in description or "Batch" in description)):
            # The request ended before its count was full: the rest of its messages does not come.
            self.wanted -= int(added(headers, b"Nats-Pending-Messages") or 0)
        elif status == "100":
            self.idle = True
        elif status:
            self._trouble = f"the consumer ended: {status} {description}"

    async def take(self) -> list[Read]:
        """Wait for messages, and return what has arrived. Raises LogUnavailable when the server falls silent."""
        self._something.clear()
        if not self._arrived and not self.done and self._trouble is None:
            try:
                async with asyncio.timeout(_DEAF_S):
                    await self._something.wait()
            except TimeoutError:
                self._trouble = "no heartbeat"
        if self._trouble is None and not self.done and not self._client.is_connected:
            self._trouble = "the connection was lost"
        if self._trouble is not None:
            raise LogUnavailable(f"cannot read the log: {self._trouble}")
        return self.rest()

    def rest(self) -> list[Read]:
        """Return what has arrived since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived


def _ns_of(rfc3339: str) -> int:
    whole, _, fraction = rfc3339.removesuffix("Z").partition(".")
    return int(datetime.fromisoformat(f"{whole}+00:00").timestamp()) * 1_000_000_000 + int(fraction.ljust(9, "0"))


def _rfc3339(time_ns: int) -> str:
    seconds, ns = divmod(time_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ns:09d}Z"
