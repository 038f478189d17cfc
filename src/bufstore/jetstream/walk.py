"""Going through all that a filter has, again and again, by position: a look costs the same however much there is."""

from __future__ import annotations

from bufstore.jetstream.messages import StoredMessage
from bufstore.jetstream.stream import NatsStream

#: The first page has so many messages at most: nobody knows yet how large they are.
_FIRST = 16


class Walk:
    """One round after the other. Any copy is read: what it lacks is at the end, and comes with the next round."""

    def __init__(
        self, stream: NatsStream, subject: str, timeout_s: float, most: int, bytes_most: int, least: int = 1
    ) -> None:
        """A page has at most `most` messages, of about `bytes_most` bytes together; but `least`, however large."""
        self._stream, self._subject, self._timeout_s = stream, subject, timeout_s
        self._most, self._bytes_most, self._least = most, bytes_most, least
        self._size = min(_FIRST, most)
        #: What comes next is above this sequence; 0: a round has ended.
        self.position = 0

    async def next(self, limit: int) -> list[StoredMessage]:
        """The next page, of no more than `limit` messages. Raises LogUnavailable."""
        size = min(limit, self._size)
        page = await self._stream.read(self._subject, self.position, self._timeout_s, size)
        self.position = page[-1].seq if len(page) >= size else 0
        bytes_each = sum(len(message.body) for message in page) / len(page) if page else 0.0
        fitting = int(self._bytes_most / max(bytes_each, 1.0))
        self._size = min(self._most, 2 * self._size, max(fitting, self._least))
        return page
