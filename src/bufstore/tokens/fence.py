"""A key's record: read, written by compare-and-set, and held by the holder that wrote itself into it.

A write's outcome is always known in the end. A hold has three guards, each for what the previous one cannot see. The
first is our own clock: without a confirmed renewal the holder stops before others may take the key. The second is the
renewal, a compare-and-set, which shows whether another holder has the key. The third is the last write, also a
compare-and-set: a holder that slept through the other guards learns there that it is too late.
"""

from __future__ import annotations

import asyncio
import base64
import math
import os
import socket
from collections.abc import Coroutine
from typing import Any, NamedTuple, Self, TypeVar

from msgspec.structs import replace
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from bufstore import elapsed
from bufstore.errors import ConfigError, LogFull, LogUnavailable, TokenBusy, TokenLost, Unavailable
from bufstore.holding import Holding
from bufstore.home import Home
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.ensure import seconds
from bufstore.jetstream.errors import MessageMissing
from bufstore.jetstream.fresh_reads import FreshReads
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subject_tokens import token
from bufstore.log_lines import LogLines
from bufstore.takes import Takes
from bufstore.tasks import BEHIND_TURNS, Closing, end, ended_within, spawn
from bufstore.tokens.model import Holder, Record, decode, encode
from bufstore.types import check_id

_log = LogLines(__name__)

H = TypeVar("H")

#: Errors of a NATS that is away, has a full disk, or has taken a right away: a worker goes on when that is over.
REFUSED = (LogUnavailable, LogFull, ConfigError)

#: The fraction of its time that is left when a holder that could not renew stops.
_MARGIN = 0.1
_RENEWED = 1 / 3
_UNRENEWED = "it was not renewed in time"
_ENDED = "it has already been completed or given back"
_ENDING = "it may already have been completed or given back"


class Seen(NamedTuple):
    """A record, its sequence (0: there is none), and its age by the server's clock."""

    seq: int
    record: Record
    age_s: float

    @property
    def holder(self) -> Holder | None:
        """The holder of the key now, if it has one."""
        held = self.record.holder and self.age_s < self.record.lease_s
        return Holder(self.record.holder, self.record.token or self.seq, self.age_s) if held else None


class Register:
    """The last record of each subject of a stream, and the sequence of the write that stored it.

    Reads are from the leader, and raise LogUnavailable.
    """

    def __init__(self, stream: NatsStream, timeout_s: float) -> None:
        self._stream, self._timeout_s = stream, timeout_s
        self._reads = FreshReads(stream, timeout_s, f"{stream.name}.unused")

    async def read(self, subject: str) -> tuple[int, Record]:
        """Return sequence and record; 0 and the record of a free key if there is none."""
        found = (await self._reads.last([subject])).get(subject)
        return (found.seq, decode(found.body)) if found is not None else (0, Record())

    async def seen(self, *which: dict[str, Any]) -> list[Seen]:
        """Return what these requests (STREAM.MSG.GET) find, with their ages.

        What was stored in the future, by a clock that went back since, is new if somebody holds it, else it is old:
        nobody knows for how long it is to wait.
        """
        found = await asyncio.gather(*map(self._get, which))
        # Ask for the time afterwards, so that nothing seems younger than it is. Both times are by the server's clock.
        now = seconds((await self._stream.info(self._timeout_s))["ts"])
        ages = [(seq, decode(body), now - stored_s) for seq, body, stored_s in found]
        return [
            Seen(seq, record, age_s if age_s >= 0 else 0.0 if record.holder else math.inf)
            for seq, record, age_s in ages
        ]

    async def _get(self, which: dict[str, Any]) -> tuple[int, bytes, float]:
        """Return sequence, body and time; if there is no message, 0 and the record of a free key, infinitely old."""
        try:
            answer = await self._stream.api(f"STREAM.MSG.GET.{self._stream.name}", which, self._timeout_s)
        except MessageMissing:
            return 0, encode(Record()), float("-inf")
        m = answer["message"]
        return m["seq"], base64.b64decode(m.get("data", "")), seconds(m["time"])

    async def remove(self, seq: int) -> None:
        """Remove the record of this sequence. Raises MessageMissing, LogUnavailable."""
        await self._stream.delete(seq, self._timeout_s)

    async def write(self, subject: str, record: Record, expected: int, ttl_s: int = 0) -> int:
        """Replace the record of sequence `expected` (0: none). Returns the new one. Raises Conflict, LogUnavailable.

        Without an answer the write is tried again: the expectation lets only one of all attempts through. A record
        found there that equals ours counts as that write, so no two records that are written may be equal.
        """
        message = Outgoing(subject, encode(record), expected=expected, ttl_s=ttl_s)

        async def once() -> int:
            try:
                seq = await self._stream.publish(message, self._timeout_s)
            except Conflict:  # perhaps an earlier attempt of ours was stored
                seq, found = await self.read(subject)
                if not seq or found != record:
                    raise
            self._reads.wrote([message], seq)
            return seq

        again = AsyncRetrying(
            wait=wait_random_exponential(multiplier=0.02, max=0.5),
            retry=retry_if_exception_type((AppendUnknown, LogUnavailable)),
        )
        writing: asyncio.Task[int] = spawn(again(once))
        try:
            if await ended_within(writing, self._timeout_s, BEHIND_TURNS):
                return writing.result()
        finally:
            await end(writing)
        raise LogUnavailable(f"{subject} may or may not have been written: no answer in time")


class Hold(NamedTuple):
    """A record that was written at sequence `seq`, and not before `began` (`bufstore.elapsed`)."""

    key: str
    register: Register
    subject: str
    seq: int
    record: Record
    began: float
    takes: Takes


class Lease:
    """What `Task` and `Lock` have in common."""

    #: The seconds after which the server removes what we write; 0: never.
    _server_ttl_s = 0

    def __init__(self, hold: Hold) -> None:
        self.key, self._register, self._subject, self._seq, record, began, self._takes = hold
        #: The token, larger than that of every earlier holder of this key. Pass it along with everything you write.
        self.token = hold.seq
        #: Set when the key was found to be lost.
        self.lost = asyncio.Event()
        self._record, self._ttl_s = replace(record, token=hold.seq), record.lease_s
        self._holding = Holding(record.lease_s * (1 - _MARGIN), began, lambda: self._lose(_UNRENEWED))
        self._reason = ""
        #: True when the item was done or given back, or the lock was released.
        self._over = False
        #: True once that was sent: the key may be another's already.
        self._ending = False
        self._changing, self._home = asyncio.Lock(), Home()

    def check(self) -> None:
        """Raise TokenLost if the key is lost, given back or done, or may be. Call this before each step that cannot be
        undone.
        """
        if self._ending and not self.lost.is_set():
            raise TokenLost(self.key, _ENDED if self._over else _ENDING)
        if self._holding.is_over:
            self._lose(_UNRENEWED)
        if self.lost.is_set():
            raise TokenLost(self.key, self._reason)

    @property
    def is_over(self) -> bool:
        """Whether its time is over, by our own clock."""
        return self._holding.is_over

    async def extend(self) -> None:
        """Hold the key for its whole time from now on. Raises TokenLost, and LogUnavailable when that is not known."""
        if self.lost.is_set():
            raise TokenLost(self.key, self._reason)
        began = elapsed.now_s()
        await self._change(self._record)
        if not self.lost.is_set():
            self._holding.confirm(began)

    async def _change(self, record: Record, *, ends: bool = False) -> None:
        """Replace our record, with one that gives the key away if it `ends`.

        Raises TokenLost, LogUnavailable; ConfigError in a forked process.
        """
        self._home.check()
        async with self._changing:
            if self._over:
                raise TokenLost(self.key, _ENDED)
            if self.lost.is_set() and not ends:  # meanwhile: a renewal would take back what was to be given up
                raise TokenLost(self.key, self._reason)
            self._record = replace(self._record, number=self._record.number + 1)
            record = replace(record, number=self._record.number)
            self._ending |= ends
            while True:
                try:
                    self._seq = await self._register.write(self._subject, record, self._seq, self._server_ttl_s)
                    self._ending = ends  # what is behind this write does not take effect any more
                    return
                except Conflict:
                    if (await self._found_again()).done:
                        if record.done:
                            return
                        raise TokenLost(self.key, "its item is done") from None  # a `done` whose caller gave up

    async def _found_again(self) -> Record:
        """Return the record that stands there: our write whose answer was lost. Raises TokenLost for another's."""
        seq, found = await self._register.read(self._subject)
        if found.mark != self._record.mark:
            self._lose(
                f"another holder took it, or it was released by force (token {found.token or seq})"
                if seq
                else "its lease expired, or it was released by force"
            )
            raise TokenLost(self.key, self._reason) from None
        self._seq = seq
        return found

    def _keep(self) -> None:
        self._holding.keep(self._renew, self._ttl_s * _RENEWED)

    async def _renew(self) -> bool:
        try:
            await self.extend()
        except TokenLost:
            pass
        except (Unavailable, *REFUSED) as e:
            _log.warning("cannot renew %r; will try again: %s", self.key, e, extra={"action": "token_renew"})
        return not self.lost.is_set()

    def _lose(self, reason: str) -> None:
        self._holding.stop()
        if not self.lost.is_set():
            self._reason = reason
            _log.warning("lost %r: %s", self.key, reason, extra={"action": "token_lost"})
            self.lost.set()


class Keyed:
    """What work and locks have in common. Their `open` returns one, for an ``async with`` block or to be closed."""

    def __init__(self, connection: Connection, register: Register, prefix: str) -> None:
        """`register` has the records of keys, whose subjects begin with `prefix`."""
        self._connection, self._register, self._prefix = connection, register, prefix
        self._takes = Takes()
        self._closing = Closing()

    async def __aenter__(self) -> Self:
        return self

    async def aclose(self) -> None:
        """Disconnect. Keys that are still held go to others when their time is over."""
        if self._connection.closes_here():
            await self._closing(self._close)

    async def _close(self) -> None:
        await self._takes.aclose()
        await self._connection.aclose()

    async def _to_the_end(self, taking: Coroutine[Any, Any, H]) -> H:
        """Await `taking`, to its end even if cancelled: a key taken by half would have no holder for its whole time."""
        return await self._takes.take(taking, self._hand_back)

    async def _hand_back(self, held: Any) -> None:
        """Release what was taken for a caller that is gone."""
        raise NotImplementedError

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def who(self, key: str) -> Holder | None:
        """Return the holder of the key, or None. Raises LogUnavailable."""
        return (await self._register.seen({"last_by_subj": self._subject(key)}))[0].holder

    async def release(self, key: str, *, force: bool = False) -> Holder | None:
        """Take the key from its holder, which then finds it lost. Returns that holder, or None.

        The item that was worked on goes to another holder. Raises TokenBusy without `force`, LogFull, LogUnavailable.
        """
        subject = self._subject(key)
        (seen,) = await self._register.seen({"last_by_subj": subject})
        seq, record, holder = seen.seq, seen.record, seen.holder
        if holder is not None and not force:
            raise TokenBusy(key, holder.name)
        while not await self._free(subject, seq, record):
            seq, record = await self._register.read(subject)
            if holder is None or not is_holder(holder, seq, record):
                break  # somebody has taken it since, who is not the one that was meant
        return holder

    async def _free(self, subject: str, seq: int, record: Record) -> bool:
        """Free the key if this is its record still; False: look again whether that has freed it."""
        raise NotImplementedError

    def _subject(self, key: str) -> str:
        return self._prefix + token(check_id(key, "the key"))


def is_holder(holder: Holder, seq: int, record: Record) -> bool:
    """Whether a record of this sequence is that of the holder."""
    return bool(record.holder) and (record.token or seq) == holder.token


def holder_name(given: str) -> str:
    """Return the name that others see as the holder: the one given, or host and process. Raises InvalidId.

    The name must be text: a record with another value could not be read, and would be taken for that of a free key.
    """
    return check_id(given, "the holder") if given != "" else f"{socket.gethostname()}:{os.getpid()}"
