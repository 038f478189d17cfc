"""Compare-and-set on one subject of a stream, whose outcome is always known in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from bufstore.errors import LogUnavailable
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing
from bufstore.jetstream.stream import NatsStream


class Register:
    """The last record of a subject, and the sequence of the write that stored it."""

    def __init__(self, stream: NatsStream, timeout_s: float) -> None:
        self._stream = stream
        self._timeout_s = timeout_s

    async def read(self, subject: str) -> tuple[int, bytes]:
        """Sequence and bytes of the record; 0 and nothing if there is none. Raises LogUnavailable."""
        found = (await self._stream.last([subject], self._timeout_s)).get(subject)
        return (found.seq, found.body) if found is not None else (0, b"")

    async def write(
        self, subject: str, body: bytes, expected: int, *, mine: Callable[[bytes], bool], ttl_s: int = 0
    ) -> int:
        """Replace the record of sequence `expected` (0: none). Returns the new one. Raises Conflict, LogUnavailable.

        Without an answer, read whether it was stored (`mine` recognizes our own record), and if not, try again: the
        expectation lets only one of all attempts through.
        """
        message = Outgoing(subject, body, expected=expected, ttl_s=ttl_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                async for attempt in AsyncRetrying(
                    wait=wait_random_exponential(multiplier=0.02, max=0.5),
                    retry=retry_if_exception_type((AppendUnknown, LogUnavailable)),
                ):
                    with attempt:
                        return await self._attempt(message, mine, attempt.retry_state.attempt_number > 1)
        except TimeoutError:
            pass
        raise LogUnavailable(f"{subject} may or may not be written: no answer in time")

    async def _attempt(self, message: Outgoing, mine: Callable[[bytes], bool], again: bool) -> int:
        try:
            return await self._stream.publish(message, self._timeout_s)
        except Conflict:
            if again:  # perhaps with our own earlier attempt
                seq, body = await self.read(message.subject)
                if seq and mine(body):
                    return seq
            raise
