"""Lanes: several logs in front of one store, for when one leader is not enough. Decides which thread is in which lane.

Each lane is a whole log with a stream and a bucket of its own (each of which may have its own leader), flushers of its
own, and a ledger in a schema of its own. A thread stays in one lane, so all promises about a thread hold as with one
log. See docs/adr/0053.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import NamedTuple

from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import ConfigDrift, ConfigError


class Layout(NamedTuple):
    """The two numbers that decide which lane a thread is in."""

    lanes: int
    partitions: int


def layout_of(log: LogConfig) -> Layout:
    """Return the layout of a log and the other lanes beside it."""
    return Layout(log.lanes, log.partitions)


def check_layout(log: LogConfig, noted: Layout | None) -> None:
    """Raise ConfigDrift when this configuration puts threads into other lanes than the ones whose ledgers know them.

    `noted`: the layout that the database has; None: it has none. A single lane has all threads, however many partitions
    it has.
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
    """Return the lane of a thread, or of the record of a run, by its id: the same in every process and release."""
    # The quotient, not the hash itself: its remainder chose the partition, and otherwise each lane could have threads
    # of some partitions only.
    return zlib.crc32(name.encode()) // log.partitions % log.lanes


def lane_configs(config: BufferConfig) -> list[BufferConfig]:
    """Return the configuration of each lane's buffer, the first lane's first; `config` is for all. Raises ConfigError.

    The first lane's log has the configured names; the other lanes' names end with the lane's number. The bounds on a
    process's bytes and threads are divided among the lanes.
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
    """Return the configuration of each lane's log, the first lane's first. Raises ConfigError."""
    if first.lane:
        raise ConfigError(
            f"stream {first.stream} is lane {first.lane} of {first.lanes}, which are opened together: "
            "name the first one's stream"
        )
    return [first, *(_numbered(first, lane) for lane in range(1, first.lanes))]


def named_logs(log: LogConfig) -> list[LogConfig]:
    """Return the logs that are meant by this one: of the first lane's all lanes', of any other only itself."""
    return [log] if log.lane else lane_logs(log)


def _numbered(first: LogConfig, lane: int) -> LogConfig:
    stream, bucket, subject = (f"{name}-{lane}" for name in (first.stream, first.bucket, first.subject))
    return replace(first, stream=stream, bucket=bucket, subject=subject, lane=lane)


def ledger_schema(schema: str, log: LogConfig) -> str:
    """Return the schema of the ledger's tables; `schema` is the store's, which the first lane's ledger shares."""
    return f"{schema}_lane{log.lane}" if log.lane else schema
