"""The log's configuration as it stands on the server, for processes that use a log that others created."""

from __future__ import annotations

from typing import Any, NamedTuple

from bufstore.buffer.target import Target
from bufstore.config import LogConfig, NatsConfig
from bufstore.errors import ConfigError
from bufstore.jetstream.buckets import placed
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.errors import StreamMissing
from bufstore.jetstream.stream import NatsStream
from bufstore.nats.setup import WITHDRAWN, check_bucket, lanes_of, target_of, windows_of


class FoundLog(NamedTuple):
    """A log as it stands on the server."""

    config: LogConfig
    #: Where the log is flushed to; None when it does not say.
    target: Target | None


async def find_log(nats: NatsConfig, stream: str, bucket: str, name: str) -> FoundLog | None:
    """Return the log; None if there is none. `name`: the name of the connection in NATS.

    So nobody has to repeat the operator's numbers of partitions and replicas. Raises ConfigError for a stream that
    bufstore has not made, LogUnavailable.
    """
    connection = Connection(nats, name)
    await connection.open()
    try:
        found = await NatsStream(connection, nats.api, stream, 1).info()
    except StreamMissing:
        return None
    finally:
        await connection.aclose()
    metadata = found["config"].get("metadata") or {}
    return FoundLog(log_config(found["config"], bucket), target_of(metadata))


def log_config(found: dict[str, Any], bucket: str | None = None) -> LogConfig:
    """Return what a stream's own configuration says; while its windows are changed, what writers may rely on.

    `bucket`: the bucket of a log of an earlier release, which does not name it; None: any bucket. Raises ConfigError
    when bufstore has not made the stream, ConfigDrift when the stream names another bucket.
    """
    metadata = found.get("metadata") or {}
    if "bufstore.partitions" not in metadata:
        raise ConfigError(f"bufstore did not create stream {found['name']!r}: name another stream")
    windows = windows_of(LogConfig(), metadata)
    lanes, lane = lanes_of(metadata)
    if lane:
        bucket = None  # a caller that names one of several lanes names the bucket of the first
    config = LogConfig(
        stream=found["name"],
        bucket=bucket or metadata.get("bufstore.bucket") or LogConfig.bucket,
        subject=found["subjects"][0].partition(".")[0].removesuffix(WITHDRAWN),
        partitions=int(metadata["bufstore.partitions"]),
        lanes=lanes,
        lane=lane,
        max_bytes=found["max_bytes"],
        failover_window_s=windows.rely_s,
        archive=windows.archives,
        **placed(found),
    )
    check_bucket(config, metadata)
    return config
