"""The log's configuration as it stands on the server, for processes that use a log that others created."""

from __future__ import annotations

from typing import Any, NamedTuple

from bufstore.buffer.target import Target
from bufstore.config import LOG_BYTES_MIN, LogConfig, NatsConfig
from bufstore.errors import ConfigDrift
from bufstore.jetstream.buckets import placed
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.errors import StreamMissing
from bufstore.jetstream.stream import NatsStream
from bufstore.nats.setup import WITHDRAWN, check_bucket, lanes_of, said_by, target_of


class FoundLog(NamedTuple):
    """A log as it stands on the server."""

    config: LogConfig
    #: Where the log is flushed to.
    target: Target


async def find_log(nats: NatsConfig, stream: str, bucket: str, name: str) -> FoundLog | None:
    """Return the log; None if there is none. `name`: the name of the connection in NATS.

    So nobody has to repeat the operator's numbers of partitions and replicas. Raises what `log_config` raises,
    LogUnavailable, and ConfigError for a server that is too old.
    """
    connection = Connection(nats, name)
    # The stream is made before the connection opens, because it looks at the server's version when it does.
    log = NatsStream(connection, nats.api, stream, 1)
    await connection.open()
    try:
        found = (await log.info())["config"]
    except StreamMissing:
        return None
    finally:
        await connection.aclose()
    return FoundLog(log_config(found, bucket), target_of(found["metadata"]))


def log_config(found: dict[str, Any], bucket: str | None = None) -> LogConfig:
    """Return what a stream's own configuration says; while its windows are changed, what writers may rely on.

    `bucket`: the bucket that the log must name; None: any bucket. Raises ConfigDrift when the stream names another
    bucket, and for a stream that is no log of this release (see `said_by`).
    """
    windows, _ = said_by(found)
    metadata = found["metadata"]
    lanes, lane = lanes_of(metadata)
    if bucket is not None and not lane:  # a caller that names another lane names the bucket of the first
        check_bucket(found["name"], bucket, metadata)
    if found["max_bytes"] < LOG_BYTES_MIN:
        raise ConfigDrift(
            f"stream {found['name']}",
            "max_bytes",
            expected="at least 1 MiB",
            found=found["max_bytes"],
            way_out="Without a bound the log fills the disk. Set it back to what the app's LogConfig has: "
            f"`nats stream edit {found['name']} --max-bytes BYTES`.",
        )
    return LogConfig(
        stream=found["name"],
        bucket=metadata["bufstore.bucket"],
        subject=found["subjects"][0].partition(".")[0].removesuffix(WITHDRAWN),
        partitions=int(metadata["bufstore.partitions"]),
        lanes=lanes,
        lane=lane,
        max_bytes=found["max_bytes"],
        failover_window_s=windows.rely_s,
        archive=windows.archives,
        **placed(found),
    )
