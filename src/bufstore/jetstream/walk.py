"""Walks through all messages that match a filter, round after round, by position: a page costs the same in any log."""

from __future__ import annotations

from bufstore.jetstream.messages import StoredMessage
from bufstore.jetstream.stream import NatsStream

#: The first page has at most this many messages: their sizes are not known yet.
_FIRST = 16


class Walk:
    """Walks one round after the other. Any copy may answer: what it lacks is at the end, so the next round has it."""

    def __init__(
        self, stream: NatsStream, subject: str, timeout_s: float, most: int, bytes_most: int, least: int = 1
    ) -> None:
        """A page has at most `most` messages, of about `bytes_most` bytes together; but `least`, however large."""
        self._stream, self._subject, self._timeout_s = stream, subject, timeout_s
        self._most, self._bytes_most, self._least = most, bytes_most, least
        self._size = min(_FIRST, most)
        #: The next page begins above this sequence; 0: a round has ended.
        self.position = 0

    async def next(self, limit: int) -> list[StoredMessage]:
        """Return the next page, of no more than `limit` messages. Raises LogUnavailable."""
        size = min(limit, self._size)
        page = await self._stream.read(self._subject, self.position, self._timeout_s, size)
        self.position = page[-1].seq if len(page) >= size else 0
        bytes_each = sum(len(message.body) for message in page) / len(page) if page else 0.0
        fitting = int(self._bytes_most / max(bytes_each, 1.0))
        self._size = min(self._most, 2 * self._size, max(fitting, self._least))
        return page
