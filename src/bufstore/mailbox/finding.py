"""Opening a mailbox on NATS by its bucket alone, with the settings that it has."""

from __future__ import annotations

from contextlib import suppress

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
    connection = Connection(nats, "bufstore mailbox")
    stream = NatsStream(connection, nats.api, f"KV_{bucket}", 1)
    await connection.open()
    try:
        found = (await stream.info())["config"]
        made = found.get("metadata") or {}
        if "bufstore.consumer" not in made:
            raise ConfigError(f"the bucket {bucket!r} is no mailbox")
        names = {"consumer": made["bufstore.consumer"], "live_subject": made["bufstore.live"]}
        names |= {"max_bytes": found["max_bytes"], **placed(found)}
        config = MailboxConfig()
        with suppress(ConsumerMissing):
            consumer = (await stream.consumer(names["consumer"]))["config"]
            names["signals_pending_max"] = consumer["max_ack_pending"]
            config = MailboxConfig(signal_ack_wait_s=consumer["ack_wait"] / 1e9)
        return NatsMailboxStore(nats, names=NatsMailboxNames(bucket=bucket, **names), config=config)
    except StreamMissing:
        raise ConfigError(f"there is no mailbox {bucket!r} on this server") from None
    finally:
        await connection.aclose()
