"""Makes or checks a stream whose sequences are tokens, and a consumer of such a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from bufstore.jetstream.drift import FREE, UNSET, check
from bufstore.jetstream.errors import ConsumerMissing, StreamMissing, StreamTaken
from bufstore.jetstream.stream import NatsStream


def seconds(stamp: str) -> float:
    """Return a timestamp of the server, in seconds since 1970."""
    return datetime.fromisoformat(stamp).timestamp()


def first_token(unix_ms: int) -> int:
    """Return the first token of a stream created at this time: above all tokens that an earlier stream can have given.

    A stream that was removed and created again would begin at 1, and a sink that had seen more would refuse everybody.
    """
    return unix_ms << 10


async def ensure_stream(
    stream: NatsStream, wanted: dict[str, Any], ours: str, metadata: dict[str, str]
) -> dict[str, Any]:
    """Create the stream with this `metadata`, or check that it is as `wanted`. Returns what STREAM.INFO says of it.

    Its sequences are never below those of an earlier stream of its name. Raises ConfigDrift, which names `ours` as the
    place of the settings, ConfigError and LogUnavailable.
    """
    name = stream.name
    try:
        info = await stream.info()
    except StreamMissing:
        made = {**wanted, "first_seq": first_token(time.time_ns() // 1_000_000), "metadata": metadata}
        try:
            info = await stream.api(f"STREAM.CREATE.{name}", made)
        except StreamTaken:  # by another process just now
            info = await stream.info()
    what, edit = f"stream {name}", f"nats stream edit {name}"
    check(what, UNSET, info["config"], "", edit)
    check(what, wanted, info["config"], ours, edit)
    stays = {field: value for field, value in wanted.items() if field not in FREE}

    def check_again(found: Mapping[str, Any]) -> None:
        check(what, UNSET, found, "", edit)
        check(what, stays, found, ours, edit)

    stream.watch_settings(check_again)
    # Use the later of two clocks: the creator's may be behind that of whoever created the earlier stream. Every process
    # does this before its first write, so the purge removes nothing.
    first = first_token(int(1000 * seconds(info["created"])))
    if info["state"]["last_seq"] < first - 1 and not info["state"]["messages"]:
        await stream.api(f"STREAM.PURGE.{name}", {"seq": first})
    return info


async def ensure_consumer(stream: NatsStream, wanted: dict[str, Any], ours: str) -> None:
    """Create the durable consumer of the stream, or check that it is as `wanted`. Raises as `ensure_stream`."""
    name = wanted["durable_name"]
    try:
        info = await stream.consumer(name)
    except ConsumerMissing:
        request = {"stream_name": stream.name, "config": wanted, "action": "create"}
        info = await stream.api(f"CONSUMER.CREATE.{stream.name}.{name}", request)
    edit = f"nats consumer edit {stream.name} {name}"
    check(f"consumer {name} of {stream.name}", wanted, info["config"], ours, edit)
