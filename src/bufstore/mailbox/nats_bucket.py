"""A mailbox's bucket: reads that show what was written before them, writes of messages as neighbours, its clock."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from bufstore.errors import LogFull, LogUnavailable, MalformedEntry, TooLarge
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.ensure import seconds
from bufstore.jetstream.fresh_reads import FreshReads
from bufstore.jetstream.group_commit import GroupCommit
from bufstore.jetstream.messages import AppendUnknown, BatchRefused, Conflict, Outgoing, StoredMessage
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subject_tokens import untoken
from bufstore.mailbox.decisions import is_stale
from bufstore.mailbox.model import Dispatch, MailboxThread
from bufstore.mailbox.nats_keys import Keys
from bufstore.mailbox.nats_room import while_full

_log = logging.getLogger(__name__)

#: Every step reads before it writes, which takes less than this share of a group's time.
_LINGER = 0.3
_OVERHEAD = 512


class Bucket(FreshReads):
    """What all parts of a mailbox on NATS stand on."""

    def __init__(self, connection: Connection, stream: NatsStream, keys: Keys, timeout_s: float) -> None:
        super().__init__(stream, timeout_s, keys.of("unused", "0"))
        self.connection = connection
        self.keys = keys
        self.writes = GroupCommit(stream, linger=_LINGER)
        self._alone = asyncio.Lock()
        #: Sequences of messages that cannot be read, of which was told.
        self._set_aside: set[int] = set()
        #: The server's clock minus ours, which no step of the wall clock moves.
        self._offset_s = 0.0

    def now_ms(self) -> int:
        """The time by the server's clock, as near as is known."""
        return round(1000 * (time.monotonic() + self._offset_s))

    def set_clock(self, info: dict[str, Any]) -> None:
        """Go by what the server has just said of the stream."""
        self._offset_s = seconds(info["ts"]) - time.monotonic()

    def check_size(self, body: bytes) -> None:
        """Raise TooLarge for what no message can hold."""
        limit = self.connection.client().max_payload - _OVERHEAD
        if len(body) > limit:
            raise TooLarge(len(body), limit)

    async def put(self, messages: Sequence[Outgoing]) -> int:
        """Write all or none, as neighbours; the last sequence. Raises Conflict, AppendUnknown, LogFull, TooLarge."""
        for message in messages:
            self.check_size(message.body)
        try:
            last = await self.writes.submit(messages)
        except LogFull:
            last = await while_full(self.timeout_s)(self._put_alone, messages)
        self.wrote(messages, last)
        return last

    async def _put_alone(self, messages: Sequence[Outgoing]) -> int:
        # A step makes room when it is done, and needs some before: many at once need more than one after the other.
        async with self._alone:
            try:
                return await self.stream.publish_batch(messages, self.timeout_s)
            except BatchRefused as e:
                raise LogUnavailable(f"the server accepts no batch now: {e}") from None

    async def put_each(self, messages: Iterable[Outgoing]) -> set[str]:
        """Write each by itself; the subjects of those that were not, or not surely."""

        async def failed(message: Outgoing) -> set[str]:
            with suppress(Conflict, AppendUnknown):
                await self.put([message])
                return set()
            return {message.subject}

        return set().union(*await asyncio.gather(*map(failed, messages)))

    def dispatches(self, found: Iterable[StoredMessage]) -> Iterator[tuple[Dispatch, StoredMessage]]:
        """What can be read; what cannot is set aside: it stands where it is, and nothing waits for it."""
        for message in found:
            try:
                if message.body:
                    yield self.keys.dispatch(message), message
            except MalformedEntry as e:
                if message.seq not in self._set_aside:
                    _log.warning("%s; it is set aside", e, extra={"action": "mailbox_foreign"})
                self._set_aside = {message.seq, *islice(self._set_aside, 1000)}

    async def states(self, thread_ids: Iterable[str]) -> dict[str, MailboxThread]:
        """As any copy has them; of those that cannot be read the empty one."""
        states = {t: MailboxThread(thread_id=t) for t in thread_ids}
        for message in (await self.copy(list(map(self.keys.thread, states)))).values():
            with suppress(MalformedEntry):
                state = self.keys.state(message, untoken(message.subject.rpartition(".")[2]))
                states[state.thread_id] = state
        return states

    async def waiting(self, found: Iterable[StoredMessage]) -> list[Dispatch]:
        """Dispatches of messages under ``q`` and ``r``; without what is superseded, and what a killed server brought
        back of those that have ended or are claimed."""
        queued = {(d.thread_id, d.dispatch_id): d for d, _ in self.dispatches(found)}
        states = await self.states({thread_id for thread_id, _ in queued})
        ended = await self.copy([self.keys.ended(d) for d in queued.values()])
        waiting = []
        for d in queued.values():
            active = states[d.thread_id].active
            claimed = active is not None and active.dispatch_id == d.dispatch_id
            if not claimed and not is_stale(d, states[d.thread_id]) and self.keys.ended(d) not in ended:
                waiting.append(d)
        return waiting
