"""Asks the work queue for one message at a time, on a connection that may be replaced at any time.

If nobody waits for a request any more, its message is handed back at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from bufstore.errors import LogUnavailable
from bufstore.jetstream.connection import Connection

_NAK = b"-NAK"
#: How much longer than asked for the server's "nothing came" may take.
_SLACK_S = 1.0


@dataclass(frozen=True)
class Delivery:
    """A message that is ours to acknowledge, and which delivery of it this is."""

    subject: str
    body: bytes
    seq: int
    count: int
    #: Where to answer the delivery.
    reply: str


class Puller:
    """One request at a time."""

    def __init__(self, connection: Connection, pull_subject: str) -> None:
        self._connection = connection
        self._pull_subject = pull_subject
        self._client: Client | None = None
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._waiting: asyncio.Future[Delivery | None] | None = None

    def lost(self) -> None:
        """The connection is gone, and with it what was asked for."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(LogUnavailable("the connection was lost while waiting for work"))

    async def next(self, wait_s: float) -> Delivery | None:
        """The next message, or None when none came in time. Raises LogUnavailable."""
        waiting: asyncio.Future[Delivery | None] = asyncio.get_running_loop().create_future()
        self._waiting = waiting
        try:
            client = await self._subscribed()
            request = {"batch": 1, "expires": max(1, round(wait_s * 1_000_000_000))}
            await client.publish(self._pull_subject, json.dumps(request).encode(), reply=self._inbox)
            await asyncio.wait([waiting], timeout=wait_s + _SLACK_S)
            return waiting.result() if waiting.done() else None
        except asyncio.CancelledError:
            await self._return(waiting)
            raise
        except (nats.errors.Error, OSError) as e:
            raise LogUnavailable(f"cannot ask for work: {type(e).__name__}") from None
        finally:
            self._waiting = None
            if waiting.done():
                waiting.exception()  # looked at, also when the request failed first

    async def _return(self, waiting: asyncio.Future[Delivery | None]) -> None:
        """Hand back a message that came just when nobody wanted it any more."""
        if waiting.done() and waiting.exception() is None and (delivery := waiting.result()) is not None:
            await self._give_back(delivery.reply)

    async def _give_back(self, reply: str) -> None:
        if self._client is not None:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._client.publish(reply, _NAK)

    async def aclose(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None and self._client is not None and self._client.is_connected:
            with contextlib.suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()

    async def _subscribed(self) -> Client:
        client = self._connection.client()
        if client is not self._client:
            self._inbox = client.new_inbox()
            self._subscription = await client.subscribe(
                self._inbox, cb=self._on_message, pending_msgs_limit=0, pending_bytes_limit=0
            )
            self._client = client
        return client

    async def _on_message(self, msg: Msg) -> None:
        waiting = self._waiting
        wanted = waiting is not None and not waiting.done()
        status = (msg.headers or {}).get("Status")
        if status is not None and not msg.reply:
            # 404 and 408: nothing came. The rest (the consumer is gone, say) is for the next request to find out.
            if wanted and waiting is not None:
                if status in ("404", "408"):
                    waiting.set_result(None)
                else:
                    text = (msg.headers or {}).get("Description", "")
                    waiting.set_exception(LogUnavailable(f"the work queue answers: {status} {text}"))
            return
        if wanted and waiting is not None:
            waiting.set_result(_delivery(msg))
        elif msg.reply:
            await self._give_back(msg.reply)


def _delivery(msg: Msg) -> Delivery:
    words = msg.reply.split(".")
    # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>…, and from 2.16 on with domain and account hash before.
    at = 2 if len(words) < 11 else 4
    return Delivery(msg.subject, msg.data, seq=int(words[at + 3]), count=int(words[at + 2]), reply=msg.reply)
