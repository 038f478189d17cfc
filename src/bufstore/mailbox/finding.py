"""Opening a mailbox on NATS by its bucket alone, with the settings that it has."""

from __future__ import annotations

from bufstore.config import NatsConfig
from bufstore.errors import ConfigError
from bufstore.jetstream.buckets import placed
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.errors import ConsumerMissing, StreamMissing
from bufstore.jetstream.stream import NatsStream
from bufstore.mailbox.config import MailboxConfig, NatsMailboxNames
from bufstore.mailbox.nats import NatsMailboxStore


async def find_mailbox(nats: NatsConfig, bucket: str) -> NatsMailboxStore:
    """The mailbox in this bucket, to be opened. Raises ConfigError when there is none, LogUnavailable."""
    names = NatsMailboxNames(bucket=bucket)
    connection = Connection(nats, "bufstore mailbox")
    stream = NatsStream(connection, nats.api, f"KV_{bucket}", 1)
    await connection.open()
    try:
        config = (await stream.api(f"STREAM.INFO.KV_{bucket}"))["config"]
        metadata = config.get("metadata") or {}
        if "bufstore.consumer" not in metadata:
            raise ConfigError(f"the bucket {bucket!r} is no mailbox")
        names = NatsMailboxNames(
            bucket=bucket,
            consumer=metadata["bufstore.consumer"],
            live_subject=metadata["bufstore.live"],
            max_bytes=config["max_bytes"],
            **placed(config),
        )
        try:
            consumer = (await stream.api(f"CONSUMER.INFO.KV_{bucket}.{names.consumer}"))["config"]
        except ConsumerMissing:
            return NatsMailboxStore(nats, names=names)
        settings = MailboxConfig(signal_ack_wait_s=consumer["ack_wait"] / 1e9)
        names = NatsMailboxNames(**{**vars(names), "signals_pending_max": consumer["max_ack_pending"]})
        return NatsMailboxStore(nats, names=names, config=settings)
    except StreamMissing:
        raise ConfigError(f"there is no mailbox {bucket!r} on this server") from None
    finally:
        await connection.aclose()
