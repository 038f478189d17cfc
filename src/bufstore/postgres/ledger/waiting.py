"""The entries that wait: rows of ``buffer_waiting``.

Each entry is kept as its messages, in the form of the log, with its checksum: a read returns what was written,
whichever release wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from psycopg import AsyncConnection

from bufstore.buffer.entry import Item, Malformed, StoredEntry, encode, item_of
from bufstore.buffer.ports.waiting import Queue, WaitingEntry, WaitingTotals
from bufstore.jetstream.messages import StoredMessage
from bufstore.postgres.connection import arrays
from bufstore.postgres.ledger.tables import LedgerTables

#: A limit that stands for no limit.
_ALL = 1 << 62

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[StoredMessage, ...])


class PostgresWaiting:
    """See `bufstore.buffer.ports.waiting.WaitingEntries`."""

    def __init__(self, tables: LedgerTables) -> None:
        self._tables = tables

    async def queues(self, partition: int) -> list[Queue]:
        found = await self._tables.run("queues", partition)
        return [Queue(t, count, int(size), reason, last) for t, count, size, reason, last in found]

    async def first(self, thread_ids: Sequence[str], entries: int, bytes_: int) -> dict[str, list[Item]]:
        found: dict[str, list[Item]] = {}
        for thread_id, seq, blob in await self._tables.run("first_waiting", arrays.texts(thread_ids), entries, bytes_):
            found.setdefault(thread_id, []).append(waiting_item(thread_id, seq, blob))
        return found

    async def of_thread(self, thread_id: str) -> list[Item]:
        return (await self.first([thread_id], _ALL, _ALL)).get(thread_id, [])

    async def threads(self, after: str, limit: int) -> list[str]:
        return [row[0] for row in await self._tables.run("waiting_threads", after, limit)]

    async def among(self, thread_ids: Sequence[str]) -> set[str]:
        return {row[0] for row in await self._tables.run("waiting_among", arrays.texts(thread_ids))}

    async def totals(self) -> WaitingTotals:
        entries, threads, size, since, reason = (await self._tables.run("waiting_totals"))[0]
        return WaitingTotals(entries=entries, threads=threads, bytes=size, since=since, reason=reason)

    async def write(
        self, connection: AsyncConnection[Any], waiting: Sequence[WaitingEntry], left: Mapping[str, int]
    ) -> None:
        """As part of a flush transaction, add entries that wait, and remove those of each thread up to `left`."""
        if left:
            await self._tables.on(connection, "leave", arrays.texts(left), arrays.longs(left.values()))
        if waiting:
            await self._tables.on(connection, "wait", *_columns(waiting))


def _columns(waiting: Sequence[WaitingEntry]) -> tuple[arrays.Array, ...]:
    items = [w.item for w in waiting]
    return (
        arrays.texts(i.thread_id for i in items),
        arrays.longs(i.seq for i in items),
        arrays.ints(w.partition for w in waiting),
        arrays.longs(i.entry.id if isinstance(i, StoredEntry) else None for i in items),
        arrays.blobs([_encoder.encode(_messages(i)) for i in items]),
        arrays.texts(w.reason.replace("\0", "?") for w in waiting),
    )


def _messages(item: Item) -> tuple[StoredMessage, ...]:
    if isinstance(item, Malformed):
        return item.messages
    header, body = encode(item.entry)
    return (StoredMessage("", item.seq, header, body),)


def waiting_item(thread_id: str, seq: int, blob: bytes) -> Item:
    """Return the entry that a row of ``buffer_waiting`` holds."""
    messages = _decoder.decode(blob)
    if len(messages) == 1:
        return item_of(messages[0], thread_id)
    return Malformed(messages[-1].subject, seq, messages, "messages that make no entry", thread_id)
