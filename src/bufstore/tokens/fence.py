"""Compare-and-set on one subject of a stream, whose outcome is always known in the end."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from bufstore.errors import LogUnavailable
from bufstore.jetstream.ensure import seconds
from bufstore.jetstream.errors import MessageMissing
from bufstore.jetstream.fresh_reads import FreshReads
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing
from bufstore.jetstream.stream import NatsStream
from bufstore.tokens.model import Holder, Record, decode, encode


class Seen(NamedTuple):
    """A record, its sequence (0: there is none), and for how long it has stood, by the server's clock."""

    seq: int
    record: Record
    age_s: float

    @property
    def holder(self) -> Holder | None:
        """Who holds the key now, if anybody does."""
        held = self.record.holder and self.age_s < self.record.lease_s
        return Holder(self.record.holder, self.record.token or self.seq, self.age_s) if held else None


class Register:
    """The last record of each subject of a stream, and the sequence of the write that stored it.

    Reads are from the leader, and raise LogUnavailable.
    """

    def __init__(self, stream: NatsStream, timeout_s: float) -> None:
        self._stream, self._timeout_s = stream, timeout_s
        self._reads = FreshReads(stream, timeout_s, f"{stream.name}.unused")

    async def read(self, subject: str) -> tuple[int, Record]:
        """Sequence and record; 0 and that of a free key if there is none."""
        found = (await self._reads.last([subject])).get(subject)
        return (found.seq, decode(found.body)) if found is not None else (0, Record())

    async def seen(self, subject: str) -> Seen:
        """The same with its age."""
        return (await self.seen_all([{"last_by_subj": subject}]))[0]

    async def seen_all(self, which: Sequence[dict[str, Any]]) -> list[Seen]:
        """What these requests (STREAM.MSG.GET) find, with their ages."""
        found = await asyncio.gather(*map(self._get, which))
        # Asked afterwards, so that nothing seems older than it is. One server's clock says both times.
        now = seconds((await self._stream.info(self._timeout_s))["ts"])
        return [
            Seen(m["seq"], decode(base64.b64decode(m.get("data", ""))), max(now - seconds(m["time"]), 0.0))
            if m
            else Seen(0, Record(), float("inf"))
            for m in found
        ]

    async def _get(self, which: dict[str, Any]) -> dict[str, Any]:
        with suppress(MessageMissing):
            found = await self._stream.api(f"STREAM.MSG.GET.{self._stream.name}", which, self._timeout_s)
            return dict(found["message"])
        return {}

    async def write(self, subject: str, record: Record, expected: int, ttl_s: int = 0) -> int:
        """Replace the record of sequence `expected` (0: none). Returns the new one. Raises Conflict, LogUnavailable.

        Without an answer it is tried again: the expectation lets only one of all attempts through. So no two records
        that are written may be equal.
        """
        message = Outgoing(subject, encode(record), expected=expected, ttl_s=ttl_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                async for attempt in AsyncRetrying(
                    wait=wait_random_exponential(multiplier=0.02, max=0.5),
                    retry=retry_if_exception_type((AppendUnknown, LogUnavailable)),
                ):
                    with attempt:
                        try:
                            seq = await self._stream.publish(message, self._timeout_s)
                            self._reads.wrote([message], seq)
                            return seq
                        except Conflict:  # perhaps with an earlier attempt of ours
                            seq, found = await self.read(subject)
                            if seq and found == record:
                                return seq
                            raise
        except TimeoutError:
            pass
        raise LogUnavailable(f"{subject} may or may not be written: no answer in time")
