"""Reads threads, runs or messages in a Python worker: what Postgres has, with what the logs hold above it.

A task sees one moment of Postgres, and reads each lane's log up to a position that is not before that moment. So each
of its rows shows its thread as a read of the store would have shown it then.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import pyarrow

from bufstore.errors import PositionPassed
from bufstore.postgres.connection import arrays
from bufstore.postgres.ledger.waiting import waiting_item
from bufstore.spark.tables.lane_logs import LaneLogs, logs_at
from bufstore.spark.tables.moment import Moment
from bufstore.spark.tables.narrowing import Narrowing
from bufstore.spark.tables.overlaid import Late, Overlaid, overlaid
from bufstore.spark.tables.shares import ALL_THREADS, Share
from bufstore.spark.tables.table_options import TableOptions
from bufstore.spark.tables.table_rows import batch_of, message_row, run_row, thread_row
from bufstore.spark.tables.tail import Handed, tail_of, taken_apart
from bufstore.threads.model import Run, Thread, decode_run
from bufstore.threads.postgres.rows import thread_of

#: How many rows a batch of Arrow has at most, and about how many bytes.
_ROWS, _BYTES = 2000, 8 << 20
#: How many threads' rows are asked for at a time.
_THREADS = 500

#: A row without `as_of`, and about how many bytes it takes.
Sized = tuple[dict[str, Any], int]


class Task(msgspec.Struct, frozen=True):
    """What one task reads."""

    share: Share
    #: What planning has read of the share's tail, by lane; empty: nothing.
    handed: Mapping[int, Handed]


async def planned(options: TableOptions) -> list[Task]:
    """Return the tasks of a read. Raises ConfigError, ConfigDrift, DataLoss, LogUnavailable, StoreUnavailable."""
    async with Moment(options.postgres, options.schema, options.snapshot) as moment:
        logs = await logs_at(options, moment)
    threads = options.narrowing.threads
    # The number of tasks does not depend on the tail: if the tail is large, each task reads all of it.
    tasks = options.tasks or options.min_tasks
    found = ALL_THREADS.divided(tasks if threads is None else max(min(tasks, len(threads)), 1))
    handed = await taken_apart(options, logs, found)
    return [Task(share, handed[n] if handed is not None else {}) for n, share in enumerate(found)]


async def batches(options: TableOptions, task: Task) -> AsyncGenerator[pyarrow.RecordBatch]:
    """Yield the rows of a share of the threads.

    Raises PositionPassed when Postgres has entries at or behind the position that is asked for, DataLoss when the log
    has lost what Postgres does not have, LogUnavailable, StoreUnavailable.
    """
    async with Moment(options.postgres, options.schema, options.snapshot) as moment:
        logs = await logs_at(options, moment)
        if options.ending_positions:
            await _Scan(options, task.share, moment, logs).check_not_passed()
        found: list[dict[str, Any]] = []
        size = 0
        tail = tail_of(options, task.share, logs, task.handed)
        async with aclosing(_rows(options, moment, logs, tail)) as rows:
            async for row, bytes_ in rows:
                if not options.narrowing.has(row):
                    continue
                found.append(row | {"as_of": logs.of(row["thread_id"]).until})
                size += bytes_
                if len(found) >= _ROWS or size >= _BYTES:
                    yield batch_of(options.table, options.columns, found)
                    found, size = [], 0
        yield batch_of(options.table, options.columns, found)


async def _rows(
    options: TableOptions, moment: Moment, logs: LaneLogs, tail: AsyncGenerator[tuple[Share, dict[str, list[Late]]]]
) -> AsyncGenerator[Sized]:
    """Yield the rows of the threads, piece by piece of the tail."""
    async with aclosing(tail) as pieces:
        async for piece, late in pieces:
            scan = _Scan(options, piece, moment, logs)
            async with aclosing(scan.rows(await scan.overlay(late))) as rows:
                async for sized in rows:
                    yield sized


class _Scan:
    """One share of the threads, at one moment of Postgres, up to one position of each log."""

    def __init__(self, options: TableOptions, share: Share, moment: Moment, logs: LaneLogs) -> None:
        self._options, self._moment, self._logs = options, moment, logs
        threads = options.narrowing.threads
        self._hashes = (share.low, share.high - 1)
        self._ids = arrays.texts(sorted(threads)) if threads is not None else None

    async def check_not_passed(self) -> None:
        """Raise PositionPassed when an entry at or behind the position of its thread's lane is flushed."""
        for lane, one in self._logs.by_lane.items():
            asked = ("flushed_beyond", *self._hashes, one.until, self._ids)
            async with aclosing(self._moment.stream(*asked, lane=lane)) as found:
                async for thread_id, flushed in found:
                    raise PositionPassed(one.until, f"thread {thread_id!r} is flushed up to {flushed}")

    async def overlay(self, tail: MutableMapping[str, list[Late]]) -> dict[str, Overlaid]:
        """Return the threads with entries that are not flushed. Empties `tail`."""
        waiting: dict[str, list[Late]] = {}
        for lane, one in self._logs.by_lane.items():
            asked = ("waiting_of_share", *self._hashes, one.until, self._ids)
            async with aclosing(self._moment.stream(*asked, lane=lane)) as rows_waiting:
                async for thread_id, seq, blob, since in rows_waiting:
                    waiting.setdefault(thread_id, []).append(Late(waiting_item(thread_id, seq, blob), since))
        threads = sorted(waiting.keys() | tail.keys())
        found: dict[str, Overlaid] = {}
        for at in range(0, len(threads), _THREADS):
            for thread_id, row in (await self._stored(threads[at : at + _THREADS])).items():
                late = overlaid(thread_id, row, waiting.pop(thread_id, ()), tail.pop(thread_id, ()))
                if late is not None:
                    found[thread_id] = late
        return found

    async def _stored(self, threads: Sequence[str]) -> dict[str, tuple[Any, ...]]:
        """Return the row of each of these threads, with its watermark."""
        found = {row[0]: row[1:] for row in await self._moment.rows("thread_rows", arrays.texts(threads))}
        for lane in self._logs.by_lane:
            mine = arrays.texts(t for t in threads if self._logs.lane_of(t) == lane)
            for thread_id, *watermark in await self._moment.rows("thread_watermarks", mine, lane=lane):
                found[thread_id] += tuple(watermark)
        return found

    async def rows(self, late: Mapping[str, Overlaid]) -> AsyncGenerator[Sized]:
        """Yield the rows of the share."""
        table = self._options.table
        narrowing = self._options.narrowing
        asked = (*self._hashes, self._ids, _needles(narrowing), narrowing.changed_from, narrowing.changed_before)
        # Threads with late entries come second: such an entry may take its thread out of the narrowing, or into it.
        stored = {"threads": _stored_thread, "runs": _stored_run, "messages": _stored_message}[table]
        async with aclosing(self._moment.stream(f"{table}_of_share", *asked)) as found:
            async for row in found:
                if row[0] not in late:
                    yield stored(row)
        of_late = {"threads": self._late_threads, "runs": self._late_runs, "messages": self._late_messages}[table]
        async with aclosing(of_late(late)) as rows:
            async for sized in rows:
                yield sized

    async def _late_threads(self, late: Mapping[str, Overlaid]) -> AsyncGenerator[Sized]:
        for one in late.values():
            state = one.state
            if state.thread is None:
                continue
            run = decode_run(state.latest_run) if state.latest_run is not None else None
            mark = state.watermark
            yield _thread(state.thread, run, state.state, mark.flushed_seq, mark.broken_since, one.changed_at)

    async def _late_runs(self, late: Mapping[str, Overlaid]) -> AsyncGenerator[Sized]:
        there = [thread_id for thread_id, one in late.items() if not one.state.deleted]
        async with aclosing(self._moment.stream("runs_of_threads", arrays.texts(there))) as rows:
            async for thread_id, run_id, record, changed_at in rows:
                if run_id not in late[thread_id].state.tail_runs:
                    yield _stored_run((thread_id, record, changed_at))
        for one in late.values():
            if one.state.thread is None:
                continue
            for run_id, record in one.state.tail_runs.items():
                changed_at = one.run_times.get(run_id, one.changed_at)
                yield run_row(decode_run(record)) | {"changed_at": changed_at}, len(record)

    async def _late_messages(self, late: Mapping[str, Overlaid]) -> AsyncGenerator[Sized]:
        kept = {thread_id: one.kept for thread_id, one in late.items()}
        columns = arrays.texts(kept), arrays.ints(kept.values())
        async with aclosing(self._moment.stream("first_messages", *columns)) as rows:
            async for thread_id, seq, payload in rows:
                yield _stored_message((thread_id, seq, payload, late[thread_id].changed_at))
        for thread_id, one in late.items():
            for number, payload in one.new_messages():
                yield _stored_message((thread_id, number, payload, one.changed_at))


def _needles(narrowing: Narrowing) -> arrays.Array | None:
    """Return bytes that stand in each encoded run of one of the agents, and maybe in others; None: no such bytes."""
    if narrowing.agents is None or "" in narrowing.agents:  # an empty agent_id is not written
        return None
    encode = msgspec.msgpack.encode
    return arrays.blobs([encode("agent_id") + encode(agent) for agent in sorted(narrowing.agents)])


def _stored_thread(row: Sequence[Any]) -> Sized:
    thread_id, *columns, state, record, flushed, broken_since, changed_at = row
    thread = thread_of(thread_id, columns)
    run = decode_run(record) if record is not None else None
    return _thread(thread, run, state, flushed or 0, broken_since, changed_at)


def _thread(
    thread: Thread, run: Run | None, state: bytes | None, position: int, broken_since: int | None, changed_at: int
) -> Sized:
    row = thread_row(thread, run, state, position=position, broken_since=broken_since)
    return row | {"changed_at": changed_at}, 200 + len(row["custom"]) + len(state or b"")


def _stored_run(row: Sequence[Any]) -> Sized:
    _, record, changed_at = row
    return run_row(decode_run(record)) | {"changed_at": changed_at}, len(record)


def _stored_message(row: Sequence[Any]) -> Sized:
    thread_id, number, payload, changed_at = row
    return message_row(thread_id, number, payload) | {"changed_at": changed_at}, 2 * len(payload)
