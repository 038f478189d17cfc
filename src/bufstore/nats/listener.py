"""Hears what the server tells of the groups that it stores, and what writers tell each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import nats.errors
from nats.aio.subscription import Subscription

from bufstore.buffer.subjects import Subjects
from bufstore.errors import LogUnavailable
from bufstore.jetstream.client import ListeningClient
from bufstore.jetstream.headers import added, entry_header
from bufstore.jetstream.messages import StoredMessage


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


async def listen(
    client: ListeningClient,
    subjects: Subjects,
    stored: Callable[[StoredMessage, int], None],
    wish: Callable[[bytes], None],
) -> Listener:
    """Listen on this connection, as long as it lives."""

    def heard(subject: str, reply: str, data: bytes, headers: bytes) -> None:
        if subject == subjects.wishes:
            wish(data)
        elif (seq := added(headers, b"Nats-Sequence")) is not None:
            size = added(headers, b"Nats-Msg-Size") or "0"
            stored(StoredMessage(subjects.groups, int(seq), entry_header(headers), b""), int(size))

    try:
        return Listener(client, await client.listen(subjects.writers, heard))
    except (nats.errors.Error, OSError) as e:
        raise LogUnavailable(f"cannot listen to other writers: {type(e).__name__}") from None
