"""The stream that holds the log's groups: THREADLOG."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from bufstore.buffer.ports.log import UNALTERED, Altered
from bufstore.buffer.subjects import Subjects, first_sequence
from bufstore.buffer.target import Target
from bufstore.buffer.windows import Windows
from bufstore.config import BufferConfig
from bufstore.errors import BufstoreError, ConfigDrift, ConfigError, LogFull, LogRolledBack, LogUnavailable
from bufstore.failpoints import Failpoint, reach
from bufstore.jetstream import frames
from bufstore.jetstream.answers import Answer
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.errors import MessageMissing, StorageFull, StreamMissing, StreamTaken
from bufstore.jetstream.messages import AppendUnknown, Outgoing, Part
from bufstore.jetstream.posted import Posted
from bufstore.jetstream.stream import NatsStream
from bufstore.log_lines import LogLines
from bufstore.nats.feed import NatsFeed, consumer_config, open_feed
from bufstore.nats.fresh_end import PROOF_S, FreshEnd
from bufstore.nats.leftovers import Leftovers
from bufstore.nats.same_log import SameLog
from bufstore.nats.setup import (
    altered,
    check_in_service,
    check_stream,
    epoch_of,
    is_withdrawn,
    out_of_service,
    said_by,
    stream_config,
    with_windows,
    withdrawn,
)
from bufstore.shared_call import SharedCall

_log = LogLines(__name__)

#: The bytes that one feed asks for at once; there may be two feeds. A server takes a client for which 64 MiB wait
#: (``max_pending``) for dead and cuts it off, and nothing is read while a large window is computed.
_ASKED_BYTES_MAX = 16 << 20

#: Seconds that making a consumer may take, at first and after failures. A node that has not caught up may be chosen to
#: lead a new consumer before it knows of it, and the others need some seconds to elect another leader. Making another
#: consumer is faster. Where everything is slow, each one gets more time than the last.
_MADE_S = (2.0, 4.0, 8.0)

#: The age, in positions, at which proofs are removed; the most that all may take of the log; the size of one, in bytes.
_PROOFS_AGE_MAX = 1 << 16
_PROOFS_SHARE = 1 / 64
_PROOF_BYTES = 100
#: Seconds after which a message that no leader listens for is sent again; each time twice as many.
_NO_LEADER_PAUSE_S = 0.05
#: When a proof stands at a multiple of this, old proofs are removed. Odd, so that every rhythm of writes meets it.
_PROOFS_GO_EVERY = 257


class NatsLog(NatsStream):
    """See `bufstore.buffer.groups.stream.GroupsInStream`."""

    def __init__(self, connection: Connection, api: str, config: BufferConfig) -> None:
        super().__init__(connection, api, config.log.stream, config.log.replicas)
        self._config = config
        self._subjects = Subjects(config.log.subject, config.log.partitions)
        self._same = SameLog(config.log.stream, out_of_service(config.log)[0], config.log.replicas > 1)
        self._proof = SharedCall(lambda: self.prove(self._subjects.unused, PROOF_S))
        self._fresh = FreshEnd(self, self._subjects.groups, self._subjects.proof)
        self._proofs_age = max(1, min(_PROOFS_AGE_MAX, int(config.log.max_bytes * _PROOFS_SHARE / _PROOF_BYTES)))
        self._leftovers = Leftovers(self.remove_consumer)
        #: The number of times in a row that no consumer could be made.
        self._unmade = 0
        self._vouch: Callable[[], Awaitable[object]] | None = None
        #: The epoch and target of the log whose settings were found to be as configured; None: that was not asked yet.
        self._accepted: tuple[int, Target] | None = None
        self._generation_start = 1
        self._changed = UNALTERED
        self._windows = Windows.of(config.log)
        self._target: Target | None = None
        #: The number of times that the process has connected.
        self.connections = 0
        connection.on_connect(self._check_end)

    async def epoch(self, *, checked: bool = True) -> int | None:
        """See `bufstore.buffer.ports.log.Generations`, also for the methods up to `remove`."""
        try:
            info = await self.info()
        except StreamMissing:
            return None
        found = info["config"]
        self._windows, self._target = said_by(found)
        self._same.note(int(info["state"]["last_seq"]))
        epoch = epoch_of(found)
        if checked and (epoch, self._target) == self._accepted:  # who raises `max_bytes` must not stop those who run
            check_in_service(self._config.log, found)
        elif checked:
            self._accepted = check_stream(self._config.log, found), self._target
        self._generation_start = first_sequence(epoch)
        return epoch

    async def info(self, timeout_s: float = 5.0) -> Answer:
        info = await super().info(timeout_s)
        self._see(info["config"])
        return info

    def _see(self, found: Mapping[str, Any]) -> None:
        """Note what somebody has changed of the log's settings."""
        before, self._changed = self._changed, altered(self._config.log, found)
        # Who has not opened the log may not know its settings; who opens it is told by an error.
        if self._accepted is not None and self._changed.why not in ("", before.why):
            _log.error("the log's settings were changed: %s", self._changed.why, extra={"action": "log_altered"})

    @property
    def altered(self) -> Altered:
        return self._changed

    async def _look(self, timeout_s: float = 5.0) -> dict[str, Any]:
        info = await self.info(timeout_s)
        with contextlib.suppress(ConfigDrift):  # what the log said when it was opened stands until it is opened again
            self._windows, self._target = said_by(info["config"])
        return info

    @property
    def generation_start(self) -> int:
        return self._generation_start

    @property
    def windows(self) -> Windows:
        return self._windows

    async def set_windows(self, windows: Windows) -> None:
        found = (await self._look())["config"]
        said = with_windows(found.get("metadata") or {}, windows)
        await self.api(f"STREAM.UPDATE.{self.name}", {**found, "metadata": said})
        await self._look()
        if self._windows != windows:
            raise LogUnavailable("another process changed the log's metadata at the same time: try again")

    @property
    def target(self) -> Target | None:
        return self._target

    async def bounds(self) -> tuple[int, int]:
        info = await self._look()
        first = int(info["state"]["first_seq"]) or int(info["config"].get("first_seq", 1))
        return first, int(info["state"]["last_seq"])

    async def create(self, epoch: int, target: Target) -> None:
        wanted = stream_config(self._config.log, epoch, target)
        try:
            with contextlib.suppress(StreamTaken):  # it has other settings: the next look says which
                await self.api(f"STREAM.CREATE.{self.name}", wanted)
        except LogFull as e:
            why = e.said if isinstance(e, StorageFull) else e
            raise ConfigError(
                f"stream {self.name} cannot be created with LogConfig.max_bytes = "
                f"{self._config.log.max_bytes} ({why}): lower it, or raise the storage of the server or the account"
            ) from e

    async def withdraw(self, common: Sequence[int]) -> Sequence[int]:
        wanted, kept = withdrawn(self._config.log, (await self.info())["config"], common)
        await self.api(f"STREAM.UPDATE.{self.name}", wanted)
        return kept

    async def remove(self) -> None:
        with contextlib.suppress(StreamMissing):
            if is_withdrawn(self._config.log, (await self.info())["config"]):
                await self.api(f"STREAM.DELETE.{self.name}")

    @property
    def refused(self) -> LogRolledBack | None:
        return self._same.refused

    def refuse(self, why: LogRolledBack) -> None:
        self._same.refuse(why, self._stands_again)

    def vouched_by(self, mismatch: Callable[[], Awaitable[object]]) -> None:
        self._vouch = mismatch

    async def _stands_again(self) -> bool:
        """Return whether the log has come past all that this process has seen in it, with the same entries."""
        seen = self._same.highest
        if await self.end(5.0) < seen or (self.replicated and await self.barrier(5.0) <= seen):
            return False
        (last,) = await self.ends([self._subjects.groups], 5.0)
        return await self._same.holds_what_we_wrote(self.identity, last) and (
            self._vouch is None or await self._vouch() is None
        )

    async def aclose(self) -> None:
        """End the tasks that ask NATS of their own accord."""
        await self._same.aclose()
        await self._proof.aclose()
        await self._fresh.aclose()
        await self._leftovers.aclose()

    async def publish(self, message: Outgoing, timeout_s: float) -> int:
        self._same.check()
        self._begins()
        return self._acked(await super().publish(message, timeout_s), message)

    def post(self, message: Outgoing, timeout_s: float, ended: Callable[[int | Exception], None]) -> Posted | None:
        if self._same.refused is not None:  # `publish` says so
            return None

        def told(outcome: int | Exception) -> None:
            ended(self._acked(outcome, message) if isinstance(outcome, int) else outcome)

        self._begins()
        return super().post(message, timeout_s, told)

    def _begins(self) -> None:
        reach(Failpoint.PUBLISH_BEFORE)

    def _acked(self, seq: int, message: Outgoing) -> int:
        reach(Failpoint.PUBLISH_ACKED)
        return self._same.acked(seq, message)

    async def part(self, subject: str, seq: int, timeout_s: float, limit: int, bytes_max: int = 0) -> Part:
        part = await super().part(subject, seq, timeout_s, limit, bytes_max)
        if part.messages and self._same.refused is None:
            self._same.note(part.messages[-1].seq)
        return part

    async def end(self, timeout_s: float) -> int:
        self._same.check()
        info = await self._look(timeout_s)
        end = int(info["state"]["last_seq"])
        # While the log is refused, the highest position that was seen before stays: the log has to come past it.
        return self._same.note(end) if self._same.refused is None else end

    async def prove_leader(self, timeout_s: float) -> None:
        if self.replicated:
            self._same.check()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._proof()
            except TimeoutError:
                raise LogUnavailable("the log's leader did not prove in time that it leads") from None

    async def fresh_end(self, timeout_s: float) -> int:
        """Return where the groups end, as of a moment after the call; 0 on a single server, which always knows."""
        if not self.replicated:
            return 0
        # Here, and not in the call that all share: whoever looks whether the log stands again may ask.
        self._same.check()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._fresh()
        except LogFull:  # no byte is left for a proof: one node proves that it leads, and a node answers
            await self.prove_leader(timeout_s)
            return (await self.ends([self._subjects.groups], timeout_s))[0]
        except TimeoutError:
            raise LogUnavailable("no node proved in time where the log ends") from None

    @property
    def may_lag(self) -> bool:
        """See `bufstore.buffer.groups.stream.GroupsInStream`."""
        return self.replicated

    async def store_proof(self, expected: int | None = None) -> int:
        """Store a message, on condition that the groups end at `expected` if given; return the message's position.

        Raises Conflict when they end elsewhere, or one is being written; LogFull; LogUnavailable.
        """
        expected_of = self._subjects.groups if expected is not None else None
        message = Outgoing(self._subjects.proof, b"", expected=expected, expected_of=expected_of)
        try:
            seq = await self._stored(message)
        except LogFull:
            # The last proof stays: by it readers tell the holes below it from a loss (`bufstore.nats.ranges`).
            await self._forget_proofs({"keep": 1})
            seq = await self._stored(message)
        if self._same.refused is None:
            self._same.note(seq)
        if seq % _PROOFS_GO_EVERY == 0 and seq > self._proofs_age + 1:
            await self._forget_proofs({"seq": seq - self._proofs_age})
        return seq

    async def _stored(self, message: Outgoing) -> int:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PROOF_S
        pause = _NO_LEADER_PAUSE_S
        while True:
            left = deadline - loop.time()
            if left <= 0:  # the loop stood still
                raise LogUnavailable("no node proves that it leads the log")
            try:
                return self._seq(await self._connection.write([message], "", left, again=True))
            except AppendUnknown:
                raise LogUnavailable("no node proves that it leads the log") from None
            except LogUnavailable:
                self._connection.client()  # raises, unless the only trouble is that no node leads, and so none listens
                if left <= pause:
                    raise
            await asyncio.sleep(pause)
            pause *= 2

    async def _forget_proofs(self, which: dict[str, int]) -> None:
        with contextlib.suppress(LogUnavailable):
            await self.api(f"STREAM.PURGE.{self.name}", {"filter": self._subjects.proof, **which})

    async def barrier(self, timeout_s: float) -> int:
        if not self.replicated:
            return 0
        self._same.check()
        try:
            # Kept, so that it leaves no hole; barriers are rare. A leader that the others have left stores nothing.
            seq = await super().publish(Outgoing(self._subjects.proof, b""), timeout_s)
        except LogFull:
            await self.prove(self._subjects.unused, timeout_s)
            return await self.end(timeout_s)
        return self._same.note(seq) if self._same.refused is None else seq

    async def fill(self) -> tuple[int, int]:
        info = await self._look()
        return int(info["state"]["bytes"]), int(info["config"]["max_bytes"])

    async def overwrite(self, seq: int) -> None:
        """Remove one message, and overwrite it on disk; do nothing if it is gone."""
        # A purge would only forget where the message is.
        self._same.check()
        with contextlib.suppress(MessageMissing):
            await self.api(f"STREAM.MSG.DELETE.{self.name}", {"seq": seq})

    async def follow(self, name: str, subject: str, start: int, wake: Callable[[], None]) -> NatsFeed:
        """Deliver the messages of a subject from sequence `start` on. `name` belongs to this follower alone."""
        consumer = f"{self._config.log.subject}-{name}-0-0"
        config = consumer_config(consumer, subject, max(start, 1), self._config.flush_max_entries)
        bytes_max = max(min(self._config.flush_max_bytes, _ASKED_BYTES_MAX), 2 * self.message_bytes_max)
        try:
            feed = await open_feed(
                self._connection.client(),
                self,
                config,
                wake,
                bytes_max,
                self._leftovers.add,
                _MADE_S[min(self._unmade, len(_MADE_S) - 1)],
            )
        except LogUnavailable:
            self._unmade += 1
            self._leftovers.add(config["name"])
            raise
        self._unmade = 0
        return feed

    async def listen(self, subject: str, heard: Callable[[bytes], None]) -> Listener:
        """See `bufstore.buffer.groups.others.Announcements`."""
        client = self._connection.client()
        try:
            return Listener(client, await client.listen(subject, lambda subject, reply, data, headers: heard(data)))
        except (nats.errors.Error, OSError) as e:
            raise LogUnavailable(f"cannot listen to other writers: {type(e).__name__}") from None

    async def tell(self, subject: str, words: bytes) -> None:
        """Send `words` to all listeners on the subject, if that is possible."""
        with contextlib.suppress(BufstoreError, nats.errors.Error, OSError):
            await frames.post(self._connection.client(), subject, words, "")

    async def purge_below(self, seq: int) -> None:
        """Remove everything below a sequence."""
        self._same.check()
        await self.api(f"STREAM.PURGE.{self.name}", {"seq": seq})

    async def _check_end(self, client: Client) -> None:
        """Check, before a new connection is used, whether this is still the log that we wrote to; refuse it if not."""
        self.connections += 1
        reason = await self._same.look(client, f"{self._api}.STREAM.INFO.{self.name}", self._subjects.proof)
        if self._same.settings:
            self._see(self._same.settings)
        if reason is not None:
            self.refuse(LogRolledBack(reason))


class Listener:
    """Listens on a connection, as long as that lives: see `bufstore.buffer.groups.others.Listening`."""

    def __init__(self, client: Client, subscription: Subscription) -> None:
        self._client, self._subscription = client, subscription

    @property
    def lost(self) -> bool:
        return not self._client.is_connected

    async def close(self) -> None:
        if not self.lost:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._subscription.unsubscribe()
