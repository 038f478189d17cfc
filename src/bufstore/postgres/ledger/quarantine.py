"""The entries in quarantine: rows of ``buffer_quarantine``, and the transaction that replays them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import msgspec
from psycopg import AsyncConnection, errors

from bufstore.buffer.chain import Parked, Watermark
from bufstore.buffer.domain import Applies
from bufstore.buffer.entry import Malformed, StoredEntry
from bufstore.buffer.operate.replay import Outcome, ParkedEntry
from bufstore.buffer.ports.ledger import ParkedInfo, QuarantineBusy, QuarantineFull, Replay
from bufstore.failpoints import Failpoint, reach
from bufstore.jetstream.messages import StoredMessage
from bufstore.postgres.connection import arrays
from bufstore.postgres.ledger.applying import apply_batch, flush_errors, transaction_ended
from bufstore.postgres.ledger.tables import LedgerTables

#: How many entries of a thread are read at once, as by a transaction that replays them, and how many bytes.
_AT_ONCE = 500
_BYTES_AT_ONCE = 64 << 20

#: Items are parked whole: an entry, or messages that make no entry.
_decoder = msgspec.msgpack.Decoder(StoredEntry | tuple[StoredMessage, ...])


class PostgresParked:
    """See `bufstore.buffer.ports.ledger.ParkedEntries`."""

    def __init__(self, tables: LedgerTables, target: Applies[Any], limit: int, idle_max: int) -> None:
        self._tables, self._target = tables, target
        self._limit, self._idle_max = limit, idle_max

    async def page(self, after: int, thread_id: str | None, limit: int) -> list[ParkedInfo]:
        names = ("seq", "thread_id", "entry_id", "cause", "bytes", "hash", "parked_at", "superseded")
        rows = await self._tables.run("parked_list", after, thread_id, limit)
        return [ParkedInfo(**dict(zip(names, row, strict=True))) for row in rows]

    async def entry(self, seq: int) -> ParkedEntry | None:
        rows = await self._tables.run("parked_entry", seq)
        return _entry(rows[0]) if rows else None

    async def of_thread(self, thread_id: str, start: int) -> list[ParkedEntry]:
        rows = await self._tables.run("parked_of_thread", thread_id, start, _AT_ONCE, _BYTES_AT_ONCE)
        return [_entry(row) for row in rows]

    async def present(self, seqs: Sequence[int]) -> set[int]:
        return {row[0] for row in await self._tables.run("parked_at", arrays.longs(seqs))}

    async def threads(self, after: str, limit: int) -> list[str]:
        return [row[0] for row in await self._tables.run("parked_threads", after, limit)]

    async def ends(self) -> dict[str, int]:
        return dict(await self._tables.run("parked_ends"))

    async def park(self, connection: AsyncConnection[Any], parked: Sequence[Parked]) -> None:
        """Park entries, as part of a flush transaction. Raises QuarantineFull, QuarantineBusy."""
        try:
            await self._tables.on(connection, "lock_quarantine")
        except errors.LockNotAvailable:
            # Only the entries to be parked wait for that lock.
            raise QuarantineBusy from None
        count = (await self._tables.on(connection, "quarantined"))[0][0]
        if count + len(parked) > self._limit:
            raise QuarantineFull(max(0, self._limit - count), self._limit)
        await self._tables.on(connection, "park", *_parked_columns(parked))

    async def replay(
        self, thread_id: str, start: int, decide: Callable[[Watermark, Sequence[ParkedEntry]], Replay]
    ) -> Replay:
        await self._tables.setup()
        async with self._tables.lend() as connection:
            with flush_errors():
                async with connection.transaction():
                    locked = await self._tables.on(connection, "lock_thread", thread_id, self._idle_max)
                    row = Watermark(*locked[0][:7]) if locked else Watermark()
                    found = await self._tables.on(
                        connection, "parked_of_thread", thread_id, start, _AT_ONCE, _BYTES_AT_ONCE
                    )
                    replay = decide(row, [_entry(r) for r in found])
                    if replay.change is not None:
                        await apply_batch(self._target, connection, [replay.change])
                        reach(Failpoint.REPLAY_APPLIED)
                        if locked and await self._tables.on(connection, "still_open") != [(True,)]:
                            raise transaction_ended()
                        await self._settle(connection, thread_id, row, replay)
                        reach(Failpoint.REPLAY_SETTLED)
        return replay

    async def _settle(
        self, connection: AsyncConnection[Any], thread_id: str, before: Watermark, replay: Replay
    ) -> None:
        applied = [o.seq for o in replay.plan.outcomes if o.outcome is Outcome.APPLIED]
        after = replay.plan.watermark
        await self._tables.on(connection, "advance_threads", *row_columns({thread_id: after}))
        await self._tables.on(connection, "unpark", arrays.longs(applied))
        await self._tables.on(connection, "rebase_parked", thread_id, applied[-1], before.applied_id, after.applied_id)
        await self._tables.on(connection, "mend_thread", thread_id)

    async def discard(self, seqs: Sequence[int]) -> int:
        return sum([await self._discard(seq) for seq in sorted(set(seqs))])

    async def _discard(self, seq: int) -> int:
        found = await self.entry(seq)
        if found is None:
            return 0
        if found.thread_id is None:
            return len(await self._tables.run("unpark_nameless", arrays.longs([seq])))
        async with self._tables.lend() as connection, connection.transaction():
            await self._tables.on(connection, "lock_thread", found.thread_id, self._idle_max)
            # Before this transaction had the lock, a replay may have applied the entry: then the entry is not given up.
            gone = await self._tables.on(connection, "unpark", arrays.longs([seq]))
            reach(Failpoint.DISCARD_WRITTEN)
            if gone:
                await self._tables.on(connection, "give_up", found.thread_id, seq)
                await self._tables.on(connection, "mend_thread", found.thread_id)
        return len(gone)


def row_columns(rows: dict[str, Watermark]) -> tuple[arrays.Array, ...]:
    """Return the parameters of ``advance_threads``."""
    return (
        arrays.texts(rows),
        arrays.longs(r.flushed_seq for r in rows.values()),
        arrays.longs(r.applied_id for r in rows.values()),
        arrays.longs(r.version for r in rows.values()),
        arrays.blobs([r.keys for r in rows.values()]),
        arrays.longs(r.broken_since or 0 for r in rows.values()),
        arrays.ints(r.gone for r in rows.values()),
        arrays.blobs([r.producers for r in rows.values()]),
    )


def _parked_columns(parked: Sequence[Parked]) -> tuple[arrays.Array, ...]:
    blobs = [msgspec.msgpack.encode(_whole(p)) for p in parked]
    return (
        arrays.longs(p.item.seq for p in parked),
        arrays.texts(sha256(blob).hexdigest() for blob in blobs),
        arrays.texts(p.item.thread_id for p in parked),
        arrays.longs(0 if isinstance(p.item, Malformed) else p.item.entry.id for p in parked),
        arrays.longs(p.base_id for p in parked),
        arrays.texts(p.cause.replace("\0", "?") for p in parked),
        arrays.blobs(blobs),
    )


def _whole(parked: Parked) -> Any:
    """Return the parked item with nothing left out: raw messages if they could not be decoded, else the entry."""
    return parked.item.messages if isinstance(parked.item, Malformed) else parked.item


def _entry(row: tuple[Any, ...]) -> ParkedEntry:
    seq, thread_id, base_id, cause, parked_at, blob = row
    whole = _decoder.decode(blob)
    item = whole if isinstance(whole, StoredEntry) else Malformed(whole[-1].subject, seq, whole, cause, thread_id)
    return ParkedEntry(seq=seq, thread_id=thread_id, base_id=base_id, cause=cause, parked_at=parked_at, item=item)
