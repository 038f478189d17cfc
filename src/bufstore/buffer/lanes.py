"""Lanes: several logs in front of one store, for when one leader is not enough; which thread is in which: decisions.

Each lane is a whole log: a stream and a bucket of its own, which may have leaders of their own, flushers of its own,
and a ledger in a schema of its own. A thread stays in one lane, so everything that is promised of a thread holds as
with one log. See docs/adr/0053.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import NamedTuple

from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import ConfigDrift


class Layout(NamedTuple):
    """All that decides which lane a thread is in."""

    lanes: int
    partitions: int


def layout_of(log: LogConfig) -> Layout:
    """That of a log and the other lanes beside it."""
    return Layout(log.lanes, log.partitions)


def check_layout(log: LogConfig, noted: Layout | None) -> None:
    """Raise ConfigDrift when threads would be looked for in other lanes than the ones whose ledgers know them.

    `noted`: by the database. A log without others has all threads, by whatever partitions.
    """
    wanted = layout_of(log)
    if noted is None or wanted == noted or wanted.lanes == noted.lanes == 1:
        return
    field = "lanes" if wanted.lanes != noted.lanes else "partitions"
    raise ConfigDrift(
        f"the database of stream {log.stream}",
        field,
        expected=str(getattr(wanted, field)),
        found=str(getattr(noted, field)),
        way_out=f"Which lane a thread is in is fixed for the life of its ledgers: set LogConfig.lanes to {noted.lanes} "
        f"and LogConfig.partitions to {noted.partitions}, or choose another stream, bucket and schema.",
    )


def lane_of(name: str, log: LogConfig) -> int:
    """The lane of a thread, or of what is known of a run, by its id: the same in every process and release."""
    # What is left of the number that chose the partition: else each lane would have threads of some partitions only.
    return zlib.crc32(name.encode()) // log.partitions % log.lanes


def lane_configs(config: BufferConfig) -> list[BufferConfig]:
    """The configuration of each lane's buffer, the first lane's first; `config` is of all. Raises ConfigError.

    The first lane's log has the names that are configured; the others' have their number behind them. What bounds the
    memory of a process is divided among them.
    """
    lanes = config.log.lanes
    return [
        replace(
            config,
            log=log,
            cached_threads=max(config.cached_threads // lanes, 1),
            flush_max_bytes=max(config.flush_max_bytes // lanes, 1),
        )
        for log in lane_logs(config.log)
    ]


def lane_logs(first: LogConfig) -> list[LogConfig]:
    """The log of each lane, the first one's first. Raises ConfigError."""
    return [first, *(_numbered(first, lane) for lane in range(1, first.lanes))]


def _numbered(first: LogConfig, lane: int) -> LogConfig:
    stream, bucket, subject = (f"{name}-{lane}" for name in (first.stream, first.bucket, first.subject))
    return replace(first, stream=stream, bucket=bucket, subject=subject, lane=lane)


def ledger_schema(schema: str, log: LogConfig) -> str:
    """The schema of the ledger's tables; `schema` is that of the store's, where the first lane has its own."""
    return f"{schema}_lane{log.lane}" if log.lane else schema
