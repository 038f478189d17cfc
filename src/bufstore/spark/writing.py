"""Writing a task's rows, in a Python worker: through the store's own append path, in order within a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from bufstore.config import BufferConfig
from bufstore.errors import BufstoreError, LogFull, Rejected
from bufstore.postgres.store import PostgresThreadStore
from bufstore.spark.config import SinkConfig
from bufstore.spark.ledger import SparkLedger
from bufstore.spark.rows import number_of, write_of
from bufstore.spark.worker import loop
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.types import SourceMark

_POOL = 4
_SHOWN = 10

Row = Mapping[str, Any]


class Outcome(msgspec.Struct):
    """What became of rows."""

    written: int = 0
    #: Were there already, from an earlier try.
    repeated: int = 0
    #: Cannot become checkpoints.
    bad: int = 0
    #: Not tried, because a row before them in their thread is bad and the batch fails.
    behind: int = 0
    #: What is wrong with the first of the bad ones.
    reasons: list[str] = msgspec.field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Add what became of other rows."""
        self.written += other.written
        self.repeated += other.repeated
        self.bad += other.bad
        self.behind += other.behind
        self.reasons = (self.reasons + other.reasons)[:_SHOWN]

    def refuse(self, row: Row, error: Rejected) -> None:
        """Count a bad row."""
        self.bad += 1
        if len(self.reasons) < _SHOWN:
            self.reasons.append(f"thread {row['thread_id']!r}: {error}")


def write_rows(config: SinkConfig, batch_id: int | None, parts: Iterable[Sequence[Row]]) -> Outcome:
    """Write rows that are sorted by thread, part by part.

    `batch_id`: the rows are numbered by it; without one, a repeat is not recognized. Raises BufstoreError when it is
    not the rows' fault: the task is to be tried again.
    """
    outcome = Outcome()
    ranks: dict[str, int] = {}
    failed: set[str] = set()
    for part in parts:
        if part:
            ranks = loop().run(_write(config, batch_id, part, ranks, failed, outcome))
    return outcome


async def _write(
    config: SinkConfig,
    batch_id: int | None,
    rows: Sequence[Row],
    ranks: Mapping[str, int],
    failed: set[str],
    outcome: Outcome,
) -> dict[str, int]:
    """The number of rows so far of the last thread, whose rows may go on in the next part."""
    store, ledger = await _opened(config)
    threads: dict[str, list[Row]] = {}
    for row in rows:
        threads.setdefault(row["thread_id"], []).append(row)
    room = asyncio.Semaphore(config.in_flight)

    async def write_thread(thread_id: str, rows: Sequence[Row]) -> None:
        # One after the other: a row that is refused must not be passed by those behind it, or a repeat of the batch
        # would take it for one that is there.
        for rank, row in enumerate(rows, ranks.get(thread_id, 0)):
            if thread_id in failed:
                outcome.behind += 1
                continue
            async with room:
                try:
                    await _write_row(store, config, batch_id, rank, row, outcome)
                except LogFull:
                    raise  # no fault of the row
                except Rejected as e:
                    outcome.refuse(row, e)
                    if config.bad_rows == "fail":
                        failed.add(thread_id)
                    else:
                        await ledger.quarantine(config.app_id, batch_id or 0, rank, row, str(e))

    try:
        async with asyncio.TaskGroup() as group:
            for thread_id, of_thread in threads.items():
                group.create_task(write_thread(thread_id, of_thread))
    except* BufstoreError as e:
        raise e.exceptions[0] from None  # one says enough, and Spark shows it
    last = next(reversed(threads))
    return {last: ranks.get(last, 0) + len(threads[last])}


async def _write_row(
    store: BufferedThreadStore, config: SinkConfig, batch_id: int | None, rank: int, row: Row, outcome: Outcome
) -> None:
    wanted = write_of(row)
    mark = SourceMark(config.app_id, number_of(batch_id, rank)) if batch_id is not None else None
    call = store.checkpoint if wanted.whole else store.checkpoint_append
    receipt = await call(wanted.thread_id, wanted.messages, wanted.run, source=mark)
    outcome.written += not receipt.repeated
    outcome.repeated += receipt.repeated


async def _opened(config: SinkConfig) -> tuple[BufferedThreadStore, SparkLedger]:
    async def open_() -> tuple[BufferedThreadStore, SparkLedger]:
        buffer = BufferConfig(
            log=await config.find_log(),
            flusher=False,
            append_timeout_s=config.append_timeout_s,
            failover_window_s=max(BufferConfig.failover_window_s, 2 * config.append_timeout_s),
        )
        inner = PostgresThreadStore(config.postgres, schema=config.schema, pool_size=_POOL)
        store = await BufferedThreadStore.open(inner, nats=config.server, config=buffer)
        ledger = SparkLedger(config.postgres, config.schema)
        await ledger.open()
        return store, ledger

    key = (config.server.servers, config.stream, config.postgres, config.schema, config.append_timeout_s)
    return await loop().opened(key, open_)
