"""The shared-state bucket: run → thread, live members, progress. Losing it loses no write.

Values are written by plain publishes on the bucket's subjects, so a listener on such a subject hears of a change
without a consumer.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from bufstore.buffer.append.lookups import Lookups
from bufstore.buffer.lanes import named_logs
from bufstore.buffer.ports.log import Floor
from bufstore.buffer.ports.shared_state import RUN_TTL_S
from bufstore.config import LogConfig
from bufstore.errors import ConfigError, LogFull, LogUnavailable, MalformedEntry
from bufstore.failpoints import Failpoint, reach
from bufstore.jetstream.client import refusal, round_trip
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.errors import StorageFull, StreamMissing, TooManyMessages
from bufstore.jetstream.group_commit import GroupCommit
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, StoredMessage
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subject_tokens import token, untoken
from bufstore.jetstream.subscriptions import Subscriptions
from bufstore.log_lines import LogLines
from bufstore.nats.setup import bucket_stream, check_owner, ensure_bucket, found_bucket
from bufstore.tasks import end, see_error, spawn

_log = LogLines(__name__)

_TIMEOUT_S = 3.0
#: A bucket that has stored nothing in the time of a whole write is given so long to store a run's record.
_PATIENCE_S = 1.0
#: A bucket that was given up is asked again after this time.
_PROBE_EVERY_S = 30.0
#: Seconds after which a copy that lacked our own record has it, unless it lags.
_COPY_S = 0.05
#: Between two attempts to claim a run.
_PAUSE = wait_random_exponential(multiplier=0.02, max=0.2)
#: The number of characters that are kept of a flusher's trouble.
_TROUBLE_MAX = 500
#: One part in this many of a bucket with a `max_bytes` is not for runs, but for what flushers write.
_RESERVED = 8
#: The bucket's room is read again after this many seconds, or when one part in this many of the room is taken: then
#: this many processes at once leave the reserved part alone.
_LOOK_S, _WRITERS = 5.0, 64
#: How long a bucket counts as one that takes no new runs after it refused one.
_REFUSED_FOR_S = 10.0
#: The bytes that a run's record takes besides its subject and its body.
_RUN_BYTES = 150


class NatsSharedState:
    """See `bufstore.buffer.ports.shared_state.SharedState`."""

    def __init__(
        self, connection: Connection, api: str, config: LogConfig, claim_timeout_s: float = _TIMEOUT_S
    ) -> None:
        """`claim_timeout_s`: the shortest time that `claim_run` is given."""
        self._connection = connection
        self._config = config
        self._keys = f"$KV.{config.bucket}."
        self._calls = f"{config.subject}-flush."
        self._parked = f"{config.subject}-parked"
        self._stream = NatsStream(connection, api, bucket_stream(config), config.replicas)
        self._writes = GroupCommit(self._stream)
        #: Whether the last claim found that its run had been claimed: then the next claim looks first.
        self._resumed = False
        look_s = min(_TIMEOUT_S, claim_timeout_s)
        self._records = Lookups(lambda subjects: self._stream.last(subjects, look_s))
        self._subscriptions = Subscriptions(connection)
        self._room = _Room(self._stream)
        self.unregistered = ""
        #: Why the last claim was refused, and when, by the loop's time.
        self._refused, self._refused_at = "", float("-inf")
        #: Whether the bucket is in doubt: a claim was sent and waited in vain, and nothing was stored since. The last
        #: write was stored at the loop's time `_stored_at`.
        self._silent, self._stored_at = False, float("-inf")
        #: Until when a bucket in doubt is given up: NATS answered what it was asked behind a probe, but not the probe.
        self._given_up_until = float("-inf")
        #: The claim that finds out whether the bucket stores again, and when it began.
        self._probe: asyncio.Task[str] | None = None
        self._probed_at = 0.0
        #: Whether each new connection is checked for the subscription to what is parked.
        self._hears_parked = False
        #: The position of each member record that this process has written.
        self._renewed: dict[str, int] = {}

    async def check(self) -> None:
        for log in named_logs(self._config):
            with contextlib.suppress(StreamMissing):
                check_owner(log, await found_bucket(self._stream, log))

    async def setup(self) -> None:
        await ensure_bucket(self._stream, self._config)
        reach(Failpoint.BUCKET_CREATED)
        self._writes.start()

    async def aclose(self) -> None:
        """Stop writing."""
        await end(self._probe)
        await self._writes.aclose()

    @property
    def refused(self) -> str:
        return self._refused if asyncio.get_running_loop().time() - self._refused_at < _REFUSED_FOR_S else ""

    async def claim_run(self, run_id: str, thread_id: str, timeout_s: float) -> str:
        try:
            owner = await self._owner_of(run_id, thread_id, timeout_s)
        except ConfigError as e:
            self._refused, self._refused_at = str(e), asyncio.get_running_loop().time()
            raise
        self._refused = ""
        return owner

    async def _owner_of(self, run_id: str, thread_id: str, timeout_s: float) -> str:
        until = asyncio.get_running_loop().time() + timeout_s
        subject = f"{self._keys}run.{token(run_id)}"
        if self._resumed:
            # A process that takes over the work of another one meets runs that are claimed. One look for all claims
            # that come together costs less than a batch that is refused, a look for what refused it, and a batch
            # without that. (The look has its own time limit: one for each caller would take as long as all the rest.)
            with contextlib.suppress(LogUnavailable):  # the bucket may be missing: the claim makes a new one
                found = await self._records.of(subject)
                if found is not None and (owner := _thread_in(found)) is not None:
                    return owner
            self._resumed = False
        return await self._claimed(subject, run_id, thread_id, timeout_s, until)

    async def _claimed(self, subject: str, run_id: str, thread_id: str, timeout_s: float, until: float) -> str:
        """Claim the run until it is known to whom it belongs, or until the loop's time `until`."""
        message = Outgoing(subject, token(thread_id).encode(), expected=0, ttl_s=RUN_TTL_S)
        now = asyncio.get_running_loop().time
        began, longest_s, why = now(), 0.0, ""

        async def claimed() -> str:
            nonlocal longest_s, why
            tried_at = now()
            try:
                claim = self._claim_of_the_silent if self._silent else self._claim
                return await claim(message, run_id, thread_id, timeout_s)
            except (LogUnavailable, AppendUnknown) as e:
                why = f": {e}"
                raise
            finally:
                longest_s = max(longest_s, now() - tried_at)

        try:
            async with asyncio.timeout_at(until):
                with contextlib.suppress(LogUnavailable, AppendUnknown):
                    return await claimed()
                # Claiming twice equals claiming once, so retry whatever the outcome was.
                retrying = AsyncRetrying(wait=_PAUSE, retry=retry_if_exception_type((LogUnavailable, AppendUnknown)))
                return await retrying(claimed)
        except TimeoutError:
            # On replicas, so it is while a leader is elected; nodes whose disks are full answer no read either.
            # Without a connection each try ends at once, and says nothing of the bucket.
            doubt = self._stored_at < began and longest_s >= _patience_s(timeout_s)
            self._silent = not self._stream.replicated and (self._silent or doubt)
        raise LogUnavailable(f"run {run_id!r} could not be registered in time{why}; nothing was stored")

    async def _claim_of_the_silent(self, message: Outgoing, run_id: str, thread_id: str, timeout_s: float) -> str:
        """Claim the run in a bucket that stored nothing lately. If it only reads on, do without a record.

        nats-server leaves a stream in that state whose disk was full, until it is restarted. The log may be well, so
        writers go on: they wait for `_patience_s` at most while the bucket is asked, and not at all until it is asked
        again. But NATS may have been away instead: a bucket is given up only if NATS answers meanwhile.
        """
        if (owner := await self.thread_of_run(run_id, timeout_s)) is not None:
            return owner
        now = asyncio.get_running_loop().time()
        if now >= self._given_up_until:
            probe = self._probe
            if mine := probe is None or probe.done():
                probe = spawn(self._claim(message, run_id, thread_id, timeout_s), apart=True)
                probe.add_done_callback(see_error)
                self._probe, self._probed_at = probe, now
            # It goes on when this time is over, or this caller is gone: once it is stored, all is well.
            await asyncio.wait([probe], timeout=max(self._probed_at + _patience_s(timeout_s) - now, 0))
            if not probe.done() and (owner := await self.thread_of_run(run_id, timeout_s)) is not None:
                return owner
            if probe.done():
                error = LogUnavailable("the task was cancelled") if probe.cancelled() else probe.exception()
                if mine and not isinstance(error, (LogUnavailable, AppendUnknown)):
                    return probe.result()
                if self._silent:  # the connection was lost, or the run was another thread's: the next try asks again
                    raise LogUnavailable(f"the shared-state bucket has stored nothing lately: {error}")
            elif self._silent:
                self._given_up_until = asyncio.get_running_loop().time() + _PROBE_EVERY_S
        if not self._silent:
            return await self._claim(message, run_id, thread_id, timeout_s)
        self._not_registered("the shared-state bucket answers no write: restart nats-server")
        return thread_id

    async def _claim(self, message: Outgoing, run_id: str, thread_id: str, timeout_s: float) -> str:
        try:
            if not await self._room.takes(len(message.subject) + len(message.body) + _RUN_BYTES):
                raise LogFull(self._full("new runs are refused once it is seven eighths full"))
            await self._submit(message)
            self.unregistered = ""
            return thread_id
        except LogFull as e:
            self._not_registered(str(e))
            return await self.thread_of_run(run_id, timeout_s) or thread_id
        except Conflict as e:
            # Claims that were sent together failed together, and the records in their way were read for all of them.
            last = e.last or (await self._last(message.subject, timeout_s)).get(message.subject)
            owner = _thread_in(last) if last is not None else None
            if owner is None and last is not None and not message.expected:
                # Somebody has emptied the record (`nats kv del`), or written into it: it is as good as lost.
                emptied = msgspec.structs.replace(message, expected=last.seq)
                return await self._claim(emptied, run_id, thread_id, timeout_s)
            if owner is None:
                raise LogUnavailable(
                    f"run {run_id!r} has just been removed from the shared-state bucket; retry"
                ) from None
            self._resumed = True
            return owner

    def _not_registered(self, why: str) -> None:
        """Go on as if the record were lost: that stops no write."""
        if not self.unregistered:
            _log.warning("new runs are not registered: %s", why, extra={"action": "runs_unregistered"})
        self.unregistered = why

    async def thread_of_run(self, run_id: str, timeout_s: float) -> str | None:
        subject = f"{self._keys}run.{token(run_id)}"
        found = (await self._last(subject, timeout_s)).get(subject)
        return _thread_in(found) if found is not None else None

    async def lineage(self, timeout_s: float) -> tuple[int, bytes]:
        subject = f"{self._keys}lineage"
        found = (await self._last(subject, timeout_s)).get(subject)
        return (found.seq, found.body) if found is not None else (0, b"")

    async def put_lineage(self, record: bytes, expected: int, timeout_s: float) -> int:
        return await self._put(Outgoing(f"{self._keys}lineage", record, expected=expected), timeout_s)

    async def renew_member(self, member: str, ttl_s: int, trouble: str = "") -> None:
        body = trouble[:_TROUBLE_MAX].encode("utf-8", "replace")
        seq = await self._put(Outgoing(f"{self._keys}member.{member}", body, ttl_s=ttl_s), _TIMEOUT_S)
        self._renewed[member] = seq

    async def leave(self, member: str) -> None:
        self._renewed.pop(member, None)
        # This is the shortest time to live; a delete marker would stay forever.
        await self._put(Outgoing(f"{self._keys}member.{member}", b"left", ttl_s=1), _TIMEOUT_S)
        await self.announce()

    async def members(self) -> dict[str, int]:
        return {name: m.seq for name, m in (await self._members()).items()}

    async def troubles(self) -> dict[str, str]:
        return {name: m.body.decode("utf-8", "replace") for name, m in (await self._members()).items() if m.body}

    async def _members(self) -> dict[str, StoredMessage]:
        try:
            found = await self._member_records()
        except StreamMissing:
            return {}
        return {s.rpartition(".")[2]: m for s, m in sorted(found.items()) if m.body != b"left"}

    async def _member_records(self) -> Mapping[str, StoredMessage]:
        """Return the member records, but not from a copy that lags.

        Any replica answers a read with a wildcard, even one that was cut off and does not catch up for half a minute.
        All that time, members with different lists would take partitions from each other. A copy that has our own
        record has all that was written before it. Without such a copy, or without a record of our own, ask the leader
        for each record.
        """
        every = f"{self._keys}member.*"
        if self._config.replicas > 1:
            for pause in (0.0, _COPY_S) if self._renewed else ():
                await asyncio.sleep(pause)
                found = await self._stream.last([every], _TIMEOUT_S)
                ours = [(f"{self._keys}member.{name}", seq) for name, seq in self._renewed.items()]
                if all(subject in found and found[subject].seq >= seq for subject, seq in ours):
                    return found
            return {m.subject: m for m in await self._stream.after(every, 0, _TIMEOUT_S)}
        return await self._stream.last([every], _TIMEOUT_S)

    async def announce(self) -> None:
        """Tell the other members that the list has changed."""
        await self._tell(self._calls + "members", b"")

    async def report(self, progress: Mapping[int, int]) -> None:
        for partition, seq in progress.items():
            # Do not wait until it is stored: the next report overwrites it, and Postgres holds the truth.
            await self._tell(f"{self._keys}flushed.{partition}", str(seq).encode())

    async def progress(self) -> dict[int, int]:
        found = await self._last(f"{self._keys}flushed.*")
        reports = [(s.rpartition(".")[2], m.body) for s, m in found.items()]
        return {int(p): int(body) for p, body in reports if p.isdecimal() and body.isdigit()}

    async def put_floors(self, floors: Mapping[int, Floor]) -> None:
        for partition, floor in floors.items():
            await self._tell(f"{self._keys}floor.{partition}", f"{floor.settled},{floor.purgeable}".encode())

    async def floors(self) -> dict[int, Floor]:
        floors = {}
        for subject, message in (await self._last(f"{self._keys}floor.*")).items():
            with contextlib.suppress(ValueError, TypeError):  # anybody may publish here
                floors[int(subject.rpartition(".")[2])] = Floor(*map(int, message.body.split(b",")))
        return floors

    async def on_progress(self, callback: Callable[[int, int], None]) -> None:
        def heard(msg: Msg) -> None:
            callback(int(msg.subject.rpartition(".")[2]), int(msg.data))

        await self._add_listener(f"{self._keys}flushed.*", heard)

    async def tell_parked(self, thread_id: str) -> None:
        await self._tell(self._parked, token(thread_id).encode())

    async def on_parked(self, callback: Callable[[str], None]) -> None:
        await self._add_listener(self._parked, lambda msg: callback(untoken(msg.data.decode("ascii", "replace"))))
        if not self._hears_parked:
            self._hears_parked = True
            self._connection.on_connect(self._check_hears_parked)
        try:
            await self._check_hears_parked(self._connection.client())
        except (nats.errors.Error, OSError) as e:
            raise LogUnavailable(f"cannot subscribe on NATS: {type(e).__name__}") from None

    async def _check_hears_parked(self, client: Client) -> None:
        # Who does not hear it builds on parked entries: what it is told to be stored would be parked, too.
        await round_trip(client)
        if refusal(client, "subscription", self._parked) is not None:
            raise ConfigError(
                f"NATS does not permit this user to subscribe to {self._parked!r}, where writers hear which threads "
                f"are quarantined: permit it (see `bufstore permissions`)"
            )

    async def _last(self, subject: str, timeout_s: float = _TIMEOUT_S) -> dict[str, StoredMessage]:
        """Return the last message of each subject that matches; none if there is no bucket."""
        try:
            return await self._stream.last([subject], timeout_s)
        except StreamMissing:
            return {}

    async def call_owner(self, partition: int) -> None:
        await self._tell(f"{self._calls}{partition}", b"")

    async def _tell(self, subject: str, data: bytes) -> None:
        try:
            await self._connection.client().publish(self._connection.published_on(subject), data)
        except (nats.errors.Error, OSError) as e:
            raise LogUnavailable(f"cannot send to NATS: {type(e).__name__}") from None

    async def on_call(self, callback: Callable[[int], None]) -> None:
        def heard(msg: Msg) -> None:
            word = msg.subject.rpartition(".")[2]
            callback(-1 if word == "members" else int(word))

        await self._add_listener(f"{self._calls}*", heard)

    async def _put(self, message: Outgoing, timeout_s: float) -> int:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._submit(message)
        except TimeoutError:
            raise LogUnavailable("the shared-state bucket did not answer in time") from None

    async def _submit(self, message: Outgoing) -> int:
        """Store a message, for callers that bound the time themselves."""
        try:
            stored = await self._writes.submit([message])
        except LogUnavailable:
            # Maybe somebody removed the bucket. Correctness needs nothing in it, so create a new one.
            await ensure_bucket(self._stream, self._config)
            stored = await self._writes.submit([message])
        except (StorageFull, TooManyMessages):
            raise
        except LogFull as e:
            raise LogFull(self._full(str(e))) from None
        if self._silent:  # the next new run is registered, whoever has found that out
            self._silent, self.unregistered = False, ""
        self._stored_at = asyncio.get_running_loop().time()
        self._given_up_until = float("-inf")
        return stored

    def _full(self, why: str) -> str:
        return (
            f"the shared-state bucket {self._config.bucket} is full ({why}): raise its max_bytes "
            f"(`nats stream edit KV_{self._config.bucket} --max-bytes BYTES`), see docs/OPERATIONS.md"
        )

    async def _add_listener(self, subject: str, heard: Callable[[Msg], None]) -> None:
        async def on_message(msg: Msg) -> None:
            try:
                heard(msg)
            except (ValueError, MalformedEntry):  # anybody may publish here
                what = {"action": "hot_ignored"}
                _log.debug("ignoring a message that cannot be decoded: %s", msg.subject, extra=what)

        await self._subscriptions.add(subject, on_message, pending_msgs_limit=0, pending_bytes_limit=0)


class _Room:
    """Decides whether a bucket takes one more run: in one full of runs, no flusher could join or tell its progress."""

    def __init__(self, stream: NatsStream) -> None:
        self._stream = stream
        #: The bytes that runs might still take by the last look, and those that our own runs have taken since.
        self._left, self._taken = sys.maxsize, 0
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()

    async def takes(self, size: int) -> bool:
        async with self._looking:
            now = asyncio.get_running_loop().time()
            # Other processes write, too: the less room is left, the sooner it is looked at again.
            if now - self._looked_at > _LOOK_S or self._taken > max(self._left, 0) // _WRITERS:
                self._looked_at, self._taken = now, 0
                with contextlib.suppress(LogUnavailable):  # the write meets the same trouble
                    info = await self._stream.info(_TIMEOUT_S)
                    limit = info["config"].get("max_bytes", -1)
                    self._left = limit - limit // _RESERVED - info["state"]["bytes"] if limit > 0 else sys.maxsize
        if self._taken + size > self._left:
            return False
        self._taken += size
        return True


def _patience_s(timeout_s: float) -> float:
    """Return how long a caller with this time waits for a bucket in doubt."""
    return min(_PATIENCE_S, timeout_s / 3)


def _thread_in(record: StoredMessage) -> str | None:
    """Return the thread that a run's record names; None when it names none."""
    try:
        return untoken(record.body.decode("ascii", "replace")) if record.body else None
    except MalformedEntry:
        return None
