"""Which log an archive is of: one of a store's lanes, or its only one; decisions, without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bufstore.buffer.lanes import lane_logs, layout_of
from bufstore.config import LANES_MAX, LogConfig
from bufstore.errors import ConfigError
from bufstore.spark.log_archive.manifests import Manifest

_WAY_OUT = "restore into the logs (into='log'), where each thread comes into its lane"


def archived_log(manifests: Sequence[Manifest], stream: str, bucket: str, first: LogConfig | None) -> LogConfig:
    """Return the settings of the log that the archive is of, in a store whose first lane's log has these names.

    `first`: that log; None: it is gone, and the archive says how many lanes the store had. Raises ConfigError when the
    archive holds several lanes, or is of a log that the store does not have.
    """
    newest = max(manifests, key=lambda m: m.end)
    found = {(m.lanes, m.lane) for m in manifests if m.lanes}
    if len(found) > 1:
        raise ConfigError(f"the archive holds ranges of several lanes ({sorted(found)}): each lane has its own archive")
    lanes, lane = next(iter(found), (0, 0))
    if first is None:
        if not lanes and newest.stream in _streams_of_lanes(stream):
            raise ConfigError(f"the archive (stream {newest.stream}) seems to be of one of several lanes: {_WAY_OUT}")
        first = LogConfig(stream=stream, bucket=bucket, lanes=max(lanes, 1), partitions=newest.partitions)
    logs = lane_logs(first)
    if not lanes:  # an earlier release wrote it: only the name tells
        named = {log.stream: log for log in logs} if len(logs) > 1 else {newest.stream: first}
        if newest.stream not in named:
            raise ConfigError(
                f"the archive (stream {newest.stream}) does not say which of the store's lanes it is of: {_WAY_OUT}"
            )
        lanes, lane = first.lanes, named[newest.stream].lane
    archived = replace(first, lanes=lanes, partitions=newest.partitions)
    if first.lanes != lanes or (lanes > 1 and layout_of(first) != layout_of(archived)):
        raise ConfigError(
            f"the archive is of a store with {lanes} lanes and {newest.partitions} partitions, this one has "
            f"{first.lanes} and {first.partitions}, so its threads are in other lanes: {_WAY_OUT}"
        )
    return logs[lane]


def _streams_of_lanes(first: str) -> list[str]:
    return [log.stream for log in lane_logs(LogConfig(stream=first, lanes=LANES_MAX))[1:]]
