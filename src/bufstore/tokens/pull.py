"""Asks the server for deliveries, one for each waiter, on a connection that may be replaced at any time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Coroutine
from typing import Any, NamedTuple

import nats.errors

from bufstore.errors import LogUnavailable, Unavailable
from bufstore.jetstream import frames
from bufstore.jetstream.client import ListeningClient
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.headers import status_of

#: How much longer than asked for the server's "nothing came" may take.
_SLACK_S = 1.0


class Delivery(NamedTuple):
    """A message that is ours to answer, and which delivery of it this is."""

    subject: str
    seq: int
    times: int
    reply: str

    @property
    def is_turn(self) -> bool:
        """Whether it says that it is the turn of its key, and is no item."""
        return ".turn." in self.subject


class Pulls:
    """One request to the server for each waiter; what comes is the first waiter's."""

    def __init__(self, connection: Connection, pull_subject: str) -> None:
        self._connection = connection
        self._pull_subject = pull_subject
        self._inbox = ""
        self._tokens = itertools.count()
        self._waiting: dict[str, asyncio.Future[Delivery | None]] = {}
        connection.on_connect(self._listen)
        connection.on_lost(self._lost)

    async def next(self, wait_s: float) -> Delivery | None:
        """The next delivery, or None when none came in time. Raises LogUnavailable."""
        token, waiting = str(next(self._tokens)), asyncio.get_running_loop().create_future()
        self._waiting[token] = waiting
        request = json.dumps({"batch": 1, "expires": max(1, round(wait_s * 1e9))}).encode()
        try:
            await frames.post(self._connection.client(), self._pull_subject, request, f"{self._inbox}.{token}")
            await asyncio.wait([waiting], timeout=wait_s + _SLACK_S)
            return waiting.result() if waiting.done() else None
        except asyncio.CancelledError:
            if waiting.done() and waiting.exception() is None and (came := waiting.result()) is not None:
                await self.answer(came, b"-NAK")  # just when nobody wanted it any more
            raise
        except (nats.errors.Error, OSError) as e:
            raise LogUnavailable(f"cannot ask for work: {type(e).__name__}") from None
        finally:
            del self._waiting[token]
            if waiting.done():
                waiting.exception()  # looked at, also when the request failed first

    async def answer(self, delivery: Delivery | None, what: bytes) -> None:
        """Answer it, without waiting for that to arrive: a delivery without an answer comes again."""
        if delivery is not None:
            with contextlib.suppress(Unavailable, nats.errors.Error, OSError):
                await self._connection.client().publish(delivery.reply, what)

    async def _listen(self, client: ListeningClient) -> None:
        self._inbox = client.new_inbox()
        await client.listen(f"{self._inbox}.*", self._on_message)

    def _lost(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(LogUnavailable("the connection was lost while waiting for work"))

    def _on_message(self, subject: str, reply: str, data: bytes, headers: bytes) -> Coroutine[Any, Any, None] | None:
        if reply:
            words = reply.split(".")
            # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>…, from 2.16 on with domain and account hash before.
            at = 2 if len(words) < 11 else 4
            came = Delivery(subject, int(words[at + 3]), int(words[at + 2]), reply)
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result(came)
                    return None
            return self.answer(came, b"-NAK")
        asked, (code, text) = self._waiting.get(subject.rpartition(".")[2]), status_of(headers)
        if asked is not None and not asked.done():
            # 404 and 408: nothing came. The rest (the consumer is gone, say) is for the next request to find out.
            if code in ("404", "408"):
                asked.set_result(None)
            else:
                asked.set_exception(LogUnavailable(f"the items' consumer answers: {code} {text}"))
        return None
