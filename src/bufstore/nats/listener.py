"""Hears what writers tell each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import nats.errors
from nats.aio.subscription import Subscription

from bufstore.errors import LogUnavailable
from bufstore.jetstream.client import ListeningClient


class Listener:
    """See `bufstore.buffer.groups.others.Listening`."""

    def __init__(self, client: ListeningClient, subscription: Subscription) -> None:
        self._client, self._subscription = client, subscription

    @property
    def lost(self) -> bool:
        return not self._client.is_connected

    async def close(self) -> None:
        if not self.lost:
            with suppress(nats.errors.Error, OSError):
                await self._subscription.unsubscribe()


async def listen(client: ListeningClient, subject: str, heard: Callable[[bytes], None]) -> Listener:
    """Listen on this connection, as long as it lives. Raises LogUnavailable."""

    def on_message(subject: str, reply: str, data: bytes, headers: bytes) -> None:
        heard(data)

    try:
        return Listener(client, await client.listen(subject, on_message))
    except (nats.errors.Error, OSError) as e:
        raise LogUnavailable(f"cannot listen to other writers: {type(e).__name__}") from None
