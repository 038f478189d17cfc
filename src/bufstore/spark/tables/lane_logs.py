"""The logs that a read overlays on Postgres, one for each lane, as they are at a moment of Postgres or after it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import NamedTuple

from bufstore.buffer.groups.group import group_in
from bufstore.buffer.lanes import lane_logs, lane_of
from bufstore.buffer.places import first_place, group_of, number_of
from bufstore.buffer.target import check_flushable, check_same
from bufstore.config import LogConfig
from bufstore.errors import ConfigError, DataLoss, LogUnavailable, PositionPassed
from bufstore.nats.ranges import LogReader, LogState
from bufstore.spark.source.log_scan import patiently, reader_of
from bufstore.spark.source.options import ReadOptions
from bufstore.spark.tables.moment import Ledger, Moment
from bufstore.spark.tables.span import Span
from bufstore.spark.tables.table_options import TableOptions
from bufstore.threads.postgres.store import PostgresThreadStore
from bufstore.threads.protocol import kind_of


class LaneLog(NamedTuple):
    """One lane's log."""

    options: ReadOptions
    reader: LogReader
    state: LogState
    ledger: Ledger
    #: The first position that is not read.
    until: int
    #: What the log holds above Postgres, of the threads that are read.
    tail: Span


class LaneLogs:
    """The logs of all lanes that have threads that are read."""

    def __init__(self, first: LogConfig, by_lane: Mapping[int, LaneLog]) -> None:
        self._config = first
        self.by_lane = by_lane

    def lane_of(self, thread_id: str) -> int:
        return lane_of(thread_id, self._config) if self._config.lanes > 1 else 0

    def of(self, thread_id: str) -> LaneLog:
        return self.by_lane[self.lane_of(thread_id)]


async def logs_at(options: TableOptions, moment: Moment) -> LaneLogs:
    """Return the logs as they are after the moment began, so that they lack nothing that Postgres has.

    Raises ConfigError, ConfigDrift, DataLoss, LogUnavailable, PositionPassed, StoreUnavailable.
    """
    ledger = await moment.ledger(0)
    reader = await reader_of(options.log(options.stream))
    first = await patiently(partial(reader.look, fresh=True))
    configs = lane_logs(first.config)
    endings = options.ending_positions or (None,) * len(configs)
    if len(endings) != len(configs):
        raise ConfigError(
            f"option endingPosition must have a position for each of the {len(configs)} lanes, with commas between"
        )
    moment.watermarks_of(len(configs))
    threads = options.narrowing.threads
    wanted = {lane_of(t, first.config) for t in threads} if threads is not None else range(len(configs))
    found: dict[int, LaneLog] = {}
    for lane in sorted(wanted):
        of_lane = options.log(configs[lane].stream)
        if lane:
            ledger, reader = await moment.ledger(lane), await reader_of(of_lane)
        state = await patiently(partial(reader.look, fresh=True)) if lane else first
        check_flushable(of_lane.stream, state.target, kind_of(PostgresThreadStore))
        check_same(of_lane.stream, state.target, ledger.target)
        until = _until(endings[lane], state, ledger, held=options.snapshot is not None)
        mine = None if threads is None else {t for t in threads if lane_of(t, first.config) == lane}
        flushed = _flushed(mine, state, ledger)
        if not flushed:
            await _check_whole(reader, state)
        tail = _span(state, flushed, until)
        found[lane] = LaneLog(of_lane, reader, state, ledger, until, tail)
    return LaneLogs(first.config, found)


def _end_behind(ledger: Ledger, log: LogState) -> int:
    """Return where the log ends; `log` was looked at after `ledger`. Raises LogUnavailable when Postgres has more."""
    end, flushed = first_place(log.end), max(ledger.cursors.values(), default=0)
    if flushed > end:
        raise LogUnavailable(
            f"Postgres has entries up to {flushed}, but the log ends before {end}: the server that answered does not "
            "have all of it (or the log went back, see `bufstore verify`)"
        )
    return end


def _until(ending: int | None, log: LogState, ledger: Ledger, *, held: bool) -> int:
    """Return the first position that is not read. Raises ConfigError, LogUnavailable, PositionPassed."""
    if ending is None:
        return _end_behind(ledger, log)
    if ending > (end := first_place(log.end)):
        raise ConfigError(f"option endingPosition: the log ends before {end}")
    # Postgres knows when a thread was deleted only as long as the log goes back to its deletion.
    if not held and ending < first_place(log.first):
        raise PositionPassed(ending, f"the log begins at {first_place(log.first)}")
    return ending


def _flushed(threads: Collection[str] | None, log: LogState, ledger: Ledger) -> int:
    """Return the position up to which these threads (None: all) are flushed, or wait; 0: it is not known."""
    subjects = log.subjects
    partitions = range(subjects.partitions) if threads is None else {subjects.partition(t) for t in threads}
    return min((ledger.cursors.get(p, 0) for p in partitions), default=0)


async def _check_whole(reader: LogReader, log: LogState) -> None:
    """Raise DataLoss when entries are gone from a log of which Postgres has flushed nothing.

    A Postgres that was restored to before its first flush has flushed nothing, whatever was purged since.
    """
    first = await patiently(partial(reader.first_of, log.subjects.groups, log.first))
    group = group_in(first) if first is not None else None
    if group is not None and group.before:
        raise DataLoss(f"the log is purged up to message {group.seq}, but nothing of it was flushed into Postgres")


def _span(log: LogState, flushed: int, until: int) -> Span:
    """Return the span of the tail: from above `flushed` (see `_flushed`) to before position `until`."""
    # If nothing was flushed, nothing may have been removed (`_check_whole`): the log is whole from its beginning on.
    whole_from = group_of(flushed) + 1 if flushed else log.first
    start = max(group_of(flushed), log.first)
    return Span(log.created, start, group_of(until) + bool(number_of(until)), whole_from)
