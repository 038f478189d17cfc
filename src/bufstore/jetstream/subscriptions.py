"""Subscriptions that outlive a connection: each new connection gets them again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from bufstore.errors import LogUnavailable
from bufstore.jetstream.client import check_room
from bufstore.jetstream.connection import Connection

Heard = Callable[[Msg], Awaitable[None]]


class Subscriptions:
    """The subscriptions of one connection. Make them before the connection is opened."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.kept: list[_Kept] = []
        self._one_at_a_time = asyncio.Lock()
        connection.on_connect(self.again)

    async def add(self, subject: str, heard: Heard, **options: Any) -> Callable[[], Awaitable[None]]:
        """Call `heard` with each message, until the returned function is called.

        `options` as for nats-py's `subscribe`. Raises ConfigError and Unavailable.
        """
        self._connection.client()  # on another event loop, it raises before anything is touched
        kept = _Kept(subject, heard, options)

        async def stop() -> None:
            if kept in self.kept:
                self.kept.remove(kept)
            await kept.stop()

        try:
            async with self._one_at_a_time:  # NATS does not say which subscription it refuses
                client = self._connection.client()
                before = client.no_room
                self.kept.append(kept)
                await kept.start(client)
                with contextlib.suppress(nats.errors.ConnectionClosedError):  # the next connection gets it
                    await check_room(client, before)
        except (nats.errors.Error, OSError) as e:
            await stop()
            raise LogUnavailable(f"cannot subscribe on NATS: {type(e).__name__}") from None
        except BaseException:
            await stop()
            raise
        return stop

    async def again(self, client: Client) -> None:
        """Subscribe again, on a new client."""
        for kept in tuple(self.kept):
            await kept.start(client)
            if kept not in self.kept:  # it was stopped meanwhile
                await kept.stop()


class _Kept:
    def __init__(self, subject: str, heard: Heard, options: dict[str, Any]) -> None:
        self._subject, self._heard, self._options = subject, heard, options
        self._subscription: Subscription | None = None

    async def start(self, client: Client) -> None:
        self._subscription = await client.subscribe(self._subject, cb=self._heard, **self._options)

    async def stop(self) -> None:
        if self._subscription is not None:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._subscription.unsubscribe()
