"""Direct gets (NATS' ADR-31), which any copy of a stream answers: one that a copy does not answer is asked of another.

The nodes of a cluster pass reads on to one that hangs for more than a minute, until they notice. But a node that is
only slow must not get more to do by that, nor a slow link. So a read is asked again if

* nothing more of the answer was on its way, which an answer to a PING shows, and
* a read that was asked later is answered already: a node that is only slow answers in order. Without that, only one
  read at a time is asked again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import nats.errors

from bufstore.errors import ConfigError, LogUnavailable
from bufstore.jetstream import frames
from bufstore.jetstream.client import ListeningClient, round_trip
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.errors import Mirrored, TooManyResults
from bufstore.jetstream.exchange import AGAIN_S
from bufstore.jetstream.headers import added, entry_header, status_of
from bufstore.jetstream.messages import StoredMessage
from bufstore.tasks import end, ended_within, spawn


class Shown(NamedTuple):
    """What one replica answered to one request, as of one moment."""

    #: The messages, in order.
    messages: list[StoredMessage]
    #: How many messages the answer had no room for.
    more: int
    #: The last sequence that the replica had; 0 where it does not say.
    end: int


class NobodyReads(LogUnavailable):
    """No server answers direct gets of the stream."""


class DirectGets:
    """The direct gets of one stream."""

    def __init__(self, connection: Connection, api: str, stream: str, *, replicated: bool) -> None:
        self._connection, self._stream = connection, stream
        self._subject = f"{api}.DIRECT.GET.{stream}"
        #: nats-py's own way to a PING must not be given up (`round_trip`).
        self._again = replicated and frames.supported
        #: When the latest of those was asked that were answered.
        self._answered = float("-inf")
        #: The read that is asked again without a proof that its copy hangs.
        self._alone: _Read | None = None

    async def get(self, request: Mapping[str, Any], timeout_s: float, *, partly: bool) -> Shown:
        """Return the answer. `partly`: the messages that have come when the time is over are an answer, too.

        Raises NobodyReads, LogUnavailable, ConfigError.
        """
        client, body = self._connection.client(), json.dumps(request).encode()
        clock, read, pause_s = asyncio.get_running_loop().time, _Read(self._stream), AGAIN_S
        until = clock() + timeout_s
        try:
            with ExitStack() as answers:
                await self._ask(client, body, read, answers)
                while True:
                    came, left_s = read.came, until - clock()
                    last = not self._again or left_s <= pause_s
                    if await ended_within(read.done, left_s if last else pause_s) or last:
                        break
                    pause_s *= 2
                    await _all_came(client, read.done, until - clock())
                    if not read.done.done() and read.came == came and self._may_ask(read):
                        await self._ask(client, body, read, answers)
        except (TimeoutError, nats.errors.TimeoutError):
            pass
        except (nats.errors.Error, OSError) as e:
            raise LogUnavailable(f"cannot read the log: {type(e).__name__}") from None
        finally:
            if self._alone is read:
                self._alone = None
        if read.answered_at is not None:
            self._answered = max(self._answered, read.answered_at)
        return read.outcome(partly=partly)

    async def _ask(self, client: ListeningClient, body: bytes, read: _Read, answers: ExitStack) -> None:
        get = read.ask(asyncio.get_running_loop().time())
        reply = answers.enter_context(self._connection.answers(self._subject, get.add, get.end))
        await frames.post(client, self._subject, body, reply)

    def _may_ask(self, read: _Read) -> bool:
        if self._answered > read.gets[-1].asked_at:
            return True
        if self._alone is None:
            self._alone = read
        return self._alone is read


async def _all_came(client: ListeningClient, done: asyncio.Future[Shown], timeout_s: float) -> None:
    """Return once all has come that was sent to this client before, or the answer. Raises nats-py's errors."""
    echo = spawn(round_trip(client, timeout_s))
    try:
        both: list[asyncio.Future[Any]] = [done, echo]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            echo.result()
    finally:
        await end(echo)


class _Read:
    """One read: all that it was asked for, until one copy has answered whole."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self.done: asyncio.Future[Shown] = asyncio.get_running_loop().create_future()
        self.gets: list[_Get] = []
        #: When that was asked which is answered.
        self.answered_at: float | None = None

    def ask(self, at: float) -> _Get:
        """Return what takes the answers to one more ask."""
        self.gets.append(_Get(self, self._stream, at))
        return self.gets[-1]

    @property
    def came(self) -> int:
        """How many messages have come, of whichever copy."""
        return sum(map(len, self.gets))

    def outcome(self, *, partly: bool) -> Shown:
        """Return the answer, or as much as has come of one. Raises what `DirectGets.get` raises."""
        error = self.done.exception() if self.done.done() else None
        # What one copy has sent counts, although another one says that it cannot answer.
        several = len(self.gets) > 1 and isinstance(error, LogUnavailable)
        if partly and (several or not self.done.done()) and (most := max(self.gets, key=len).came()) is not None:
            return most
        if self.done.done():
            return self.done.result()
        raise LogUnavailable("the log did not answer a read in time")

    def ended(self, get: _Get, shown: Shown) -> None:
        """Take the answer, if it is the first."""
        if not self.done.done():
            self.answered_at = get.asked_at
            self.done.set_result(shown)

    def fail(self, error: Exception) -> None:
        """Take the error, if it is the first outcome."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # a cancelled reader will not retrieve it


class _Get:
    """The answers of one copy, until their end."""

    def __init__(self, read: _Read, stream: str, asked_at: float) -> None:
        self._read, self._stream, self.asked_at = read, stream, asked_at
        self._ours = f"Nats-Stream: {stream}\r\n".encode()
        self._messages: list[StoredMessage] = []
        #: The headers of the last message.
        self._headers = b""

    def __len__(self) -> int:
        return len(self._messages)

    def came(self) -> Shown | None:
        """Return what has come of an answer whose end has not come; None for nothing."""
        left = int(added(self._headers, b"Nats-Num-Pending") or "0")
        return Shown(self._messages, max(left, 1), 0) if self._messages else None

    def add(self, data: bytes, headers: bytes) -> None:
        """Take a message, whose stored subject is in a header, or the status that ends the answer."""
        # A stored message may have a status of its own, because anybody may publish. Only the server adds a sequence.
        seq = added(headers, b"Nats-Sequence")
        if seq is not None:
            # All messages come from one stream, so only the first is checked. The server lets a mirror answer, too,
            # which may lag or hold less. Behind stored headers that are malformed, the server's own may not be found.
            if not self._messages and self._ours not in headers and (by := added(headers, b"Nats-Stream")) is not None:
                self._read.fail(Mirrored(self._stream, by))
            subject = added(headers, b"Nats-Subject") or ""
            self._messages.append(StoredMessage(subject, int(seq), entry_header(headers), data))
            self._headers = headers
        else:
            self._end(*status_of(headers), headers)

    def _end(self, status: str, description: str, headers: bytes) -> None:
        if status in ("204", "404"):
            more, last = (int(added(headers, name) or "0") for name in (b"Nats-Num-Pending", b"Nats-UpTo-Sequence"))
            self._read.ended(self, Shown(self._messages, more, last))
        elif status == "503":
            self._read.fail(NobodyReads(f"nobody answers reads of stream {self._stream}"))
        elif status == "413":
            self._read.fail(TooManyResults("the log has too many subjects for one read"))
        else:
            self._read.fail(LogUnavailable(f"stream {self._stream} refused a read: {status} {description}"))

    def end(self, error: bytes | Exception) -> bool:
        """Note that no more comes."""
        lost = LogUnavailable("the connection was lost while reading")
        self._read.fail(error if isinstance(error, ConfigError) else lost)
        return False
