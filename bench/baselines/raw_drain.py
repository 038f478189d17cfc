"""*raw loop*: the log's entries go into one table as fast as they can be fetched and merged.

Raw frames from a pull consumer; then, in one transaction, a binary COPY into a temporary table, one INSERT … SELECT
that ignores existing rows, and one row for the position. The next batch is fetched meanwhile. Groups are cut into
entries; entries are not decoded, checked, ordered or coalesced.
"""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Any

from psycopg import AsyncConnection

from bench.baselines.raw_nats import RawNats
from bench.contestant import Contestant, Place
from bufstore.buffer.groups.group import body_of, decode_header
from bufstore.jetstream.headers import entry_header
from bufstore.jetstream.messages import StoredMessage

#: Groups per request.
_BATCH = 64
_LENGTHS = struct.Struct(">HH")
_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TAIL = b"\xff\xff"
_Rows = list[tuple[bytes, int, bytes]]


def entries_of(seq: int, headers: bytes, body: bytes) -> _Rows:
    """Return thread, place and rest of each entry of a group."""
    group = decode_header(StoredMessage("", seq, entry_header(headers), body))
    rows = []
    for number, (at, record) in enumerate(group.places()):
        whole = body_of(group, number, body)
        threads = _LENGTHS.unpack_from(body, record.begins)[0]
        rows.append((whole[_LENGTHS.size : _LENGTHS.size + threads], at, whole[_LENGTHS.size + threads :]))
    return rows


class RawDrain(Contestant):
    """Drains the stream `stream` into its own table."""

    def __init__(self, place: Place, *, stream: str) -> None:
        super().__init__(place)
        self._stream = stream
        self._table = f"drain_{place.name}"
        self._arrived: _Rows = []
        self._messages = 0
        self._reply = b""
        self._wake = asyncio.Event()

    async def open(self) -> None:
        self._nats = await RawNats.connect(self.place.nats)
        self._consumer = f"raw-{self.place.name}"
        config = {"durable_name": self._consumer, "ack_policy": "all", "deliver_policy": "all", "max_ack_pending": -1,
                  "filter_subject": "*.groups.0"}  # fmt: skip
        await self._nats.request(
            f"$JS.API.CONSUMER.DURABLE.CREATE.{self._stream}.{self._consumer}",
            {"stream_name": self._stream, "config": config},
        )
        self._inbox = f"{self._nats.inbox}-pull"
        self._nats.subscribe(self._inbox, self._on_message)
        self._connection: AsyncConnection[Any] = await AsyncConnection.connect(self.place.dsn, autocommit=True)
        columns = '(thread text COLLATE "C", seq bigint, payload bytea'
        await self._connection.execute(f"CREATE TABLE {self._table} {columns}, PRIMARY KEY (thread, seq))")
        await self._connection.execute(f"CREATE TABLE {self._table}_position AS SELECT 0::bigint AS seq")
        await self._connection.execute(f"CREATE TEMP TABLE arriving {columns}) ON COMMIT DELETE ROWS")

    async def close(self) -> None:
        await self._nats.request(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._consumer}")
        self._nats.close()
        await self._connection.close()

    async def drain(self, entries: int) -> float:
        """Drain `entries`, and return the entries per second."""
        began = time.perf_counter()
        done = 0
        self._pull()
        while done < entries:
            await self._wake.wait()
            self._wake.clear()
            rows, reply, self._arrived, self._messages = self._arrived, self._reply, [], 0
            done += len(rows)
            if done < entries:
                self._pull()
            await self._merge(rows)
            self._nats.write(b"PUB %b 4\r\n+ACK\r\n" % reply)
        return entries / (time.perf_counter() - began)

    def _pull(self) -> None:
        ask = b'{"batch": %d, "expires": 30000000000}' % _BATCH
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        self._nats.write(f"PUB {subject} {self._inbox} {len(ask)}\r\n".encode() + ask + b"\r\n")

    def _on_message(self, subject: bytes, reply: bytes, data: bytes, head: int) -> None:
        if reply:  # else a status
            self._arrived += entries_of(int(reply.split(b".")[5]), data[:head], data[head:])
            self._messages += 1
            self._reply = reply
            if self._messages == _BATCH or reply.endswith(b".0"):
                self._wake.set()

    async def _merge(self, rows: _Rows) -> None:
        pack = struct.Struct("!iqi").pack
        begin = struct.Struct("!hi").pack
        parts = [_HEAD]
        for subject, seq, body in rows:
            parts += (begin(3, len(subject)), subject, pack(8, seq, len(body)), body)
        parts.append(_TAIL)
        async with self._connection.transaction(), self._connection.cursor() as cursor:
            async with cursor.copy("COPY arriving FROM STDIN (FORMAT binary)") as copy:
                await copy.write(b"".join(parts))
            await cursor.execute(f"INSERT INTO {self._table} SELECT * FROM arriving ON CONFLICT DO NOTHING")
            await cursor.execute(f"UPDATE {self._table}_position SET seq = %s", [rows[-1][1]])
