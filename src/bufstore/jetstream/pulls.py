"""Asks a pull consumer for deliveries, for any number of waiters, on a connection that may be replaced at any time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Coroutine
from typing import Any, NamedTuple

import nats.errors

from bufstore.errors import ConfigError, LogUnavailable, Unavailable
from bufstore.jetstream import frames
from bufstore.jetstream.client import ListeningClient, refused_ack
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.headers import status_of

#: Seconds that the server's "nothing came" may take longer than was asked for.
_SLACK_S = 2.0
#: The longest delay before a delivery that was handed back comes again: the server counts nanoseconds in 64 bits, and
#: the worker that gets the delivery checks whether it is due.
_DELAY_MAX_S = 24 * 3600.0


class PullRefused(LogUnavailable):
    """The consumer serves no request now. `code` is its status: 503 if it is gone, 409 if too many requests wait."""

    def __init__(self, code: str, text: str) -> None:
        if code == "503":
            said = "the consumer is gone, or has no leader now: if this lasts, open again, which creates it"
        else:
            said = f"the consumer answers: {code} {text}".rstrip()
        super().__init__(said)
        self.code = code


class Delivery(NamedTuple):
    """A message that is ours to answer. `times`: 1 for its first delivery, 2 for its second, and so on."""

    subject: str
    seq: int
    times: int
    reply: str


class Numbers(NamedTuple):
    """What the reply subject of a delivery says."""

    #: As in `Delivery`.
    times: int
    seq: int
    #: The number of the delivery among all of the consumer's.
    counter: int
    stored_at_ns: int
    #: How many messages the consumer has left to deliver.
    pending: int


def numbers_of(reply: str) -> Numbers:
    """Return what a reply subject says. Raises ValueError and others for what is none: anybody may send to an inbox."""
    words = reply.split(".")
    # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>, and from 2.16 on with
    # domain and account hash before the stream.
    at = 4 if len(words) < 11 else 6
    return Numbers(*map(int, words[at : at + 5]))


class _Waiter:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.came: list[Delivery] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: LogUnavailable | ConfigError | None = None) -> None:
        if self.ended.done():
            return
        if error is None or self.came:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
            self.ended.exception()  # marked as retrieved, also when the request failed first


def _nothing_heard(data: bytes, headers: bytes) -> None:
    """Deliveries come to an inbox of their own."""


class Pulls:
    """Sends one request to the server for each waiter. A delivery goes to the first waiter."""

    def __init__(self, connection: Connection, consumer: str, pull_subject: str, ack_wait_s: float) -> None:
        """`ack_wait_s`: after how long a delivery comes again that nobody has answered."""
        self._connection = connection
        self._consumer, self._pull_subject, self._ack_wait_s = consumer, pull_subject, ack_wait_s
        #: The last answer to a delivery that NATS refused, and when that was found out, in the loop's time.
        self._refused: tuple[Exception | None, float] = None, float("-inf")
        self._answered_at = float("-inf")
        self._inbox = ""
        self._tokens = itertools.count()
        self._waiting: dict[str, _Waiter] = {}
        connection.on_connect(self._listen)
        connection.on_lost(self._lost)

    async def next(self, wait_s: float) -> Delivery | None:
        """Return the next delivery, or None when none came in time. Raises LogUnavailable, ConfigError."""
        came = await self._ask(1, {"batch": 1, "expires": max(1, round(wait_s * 1e9))}, wait_s)
        if not came:
            self._check_answers()
        return came[0] if came else None

    async def ready(self, limit: int) -> list[Delivery]:
        """Return the deliveries that can be had at once, at most `limit`. Raises LogUnavailable, ConfigError."""
        return await self._ask(limit, {"batch": limit, "no_wait": True}, 0.0)

    async def _ask(self, limit: int, request: dict[str, Any], wait_s: float) -> list[Delivery]:
        token, waiter = str(next(self._tokens)), _Waiter(limit)
        self._waiting[token] = waiter
        body = json.dumps(request).encode()

        def refused(outcome: bytes | Exception) -> bool:
            if isinstance(outcome, ConfigError):
                waiter.end(outcome)
            return False

        try:
            with self._connection.answers(self._pull_subject, _nothing_heard, refused):
                await frames.post(self._connection.client(), self._pull_subject, body, f"{self._inbox}.{token}")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s + _SLACK_S):
                        await waiter.ended
            return waiter.came
        except asyncio.CancelledError:
            for came in waiter.came:
                await self.answer(came, b"-NAK")  # it came just when the waiter gave up
            raise
        except (nats.errors.Error, OSError) as e:
            raise LogUnavailable(f"cannot ask for work: {type(e).__name__}") from None
        finally:
            del self._waiting[token]
            waiter.ended.cancel()

    def _check_answers(self) -> None:
        """Raise ConfigError if NATS has refused an answer lately: what is not answered may be all that can come."""
        now = asyncio.get_running_loop().time()
        error = refused_ack(self._connection.client(), self._consumer)
        if error is not None and error is not self._refused[0]:
            self._refused = error, now
        found_at = self._refused[1]
        # An answer since then was not refused: NATS says so within moments.
        answered = found_at < self._answered_at < now - _SLACK_S
        if not answered and now < found_at + 2 * self._ack_wait_s:
            raise ConfigError(
                "NATS does not permit this user to publish on $JS.ACK.>, where deliveries are answered: permit it"
            )

    async def answer(self, delivery: Delivery | None, what: bytes) -> None:
        """Answer a delivery, without waiting for the answer to arrive: a delivery without an answer comes again."""
        if delivery is not None:
            self._answered_at = asyncio.get_running_loop().time()
            with contextlib.suppress(Unavailable, nats.errors.Error, OSError):
                await self._connection.client().publish(delivery.reply, what)

    async def hand_back(self, delivery: Delivery | None, delay_s: float = 0.0) -> None:
        """Have a delivery come again, to any worker, after `delay_s`, or after a day if that is less."""
        delay_s = min(delay_s, _DELAY_MAX_S)
        await self.answer(delivery, b'-NAK {"delay": %d}' % round(delay_s * 1e9) if delay_s > 0 else b"-NAK")

    async def _listen(self, client: ListeningClient) -> None:
        self._inbox = client.new_inbox()
        await client.listen(f"{self._inbox}.*", self._on_message)

    def _lost(self) -> None:
        for waiter in self._waiting.values():
            waiter.end(LogUnavailable("the connection was lost while waiting for work"))

    def _on_message(self, subject: str, reply: str, data: bytes, headers: bytes) -> Coroutine[Any, Any, None] | None:
        if reply:
            numbers = numbers_of(reply)
            came = Delivery(subject, numbers.seq, numbers.times, reply)
            for waiter in self._waiting.values():
                if not waiter.ended.done():
                    waiter.came.append(came)
                    if len(waiter.came) == waiter.limit:
                        waiter.end()
                    return None
            return self.hand_back(came)
        if (asked := self._waiting.get(subject.rpartition(".")[2])) is not None:
            code, text = status_of(headers)
            # 404 and 408: nothing came, or nothing more. The waiter finds out what any other status means.
            asked.end(None if code in ("404", "408") else PullRefused(code, text))
        return None
