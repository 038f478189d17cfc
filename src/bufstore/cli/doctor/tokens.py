"""What `bufstore doctor --tokens NAME` looks at: the streams of exclusive work and of locks."""

from __future__ import annotations

from typing import Any

from bufstore.cli.connect import Endpoints
from bufstore.cli.doctor.diagnosis import CheckResult, Level, Notes
from bufstore.cli.output import lasting
from bufstore.errors import BufstoreError
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.errors import ConsumerMissing, StreamMissing
from bufstore.jetstream.server_version import ServerTooOld
from bufstore.jetstream.stream import NatsStream
from bufstore.tokens.model import WORKERS, oldest_s

_FULL = 0.9
#: When an item is older than this many leases, the holder of its key keeps renewing, or nobody works.
_OLD = 10


async def check_tokens(target: Endpoints, name: str) -> list[CheckResult]:
    """Return the checks of the tokens of this name."""
    notes = Notes(f"tokens {name}")
    connection = Connection(target.nats, target.session)
    stream = NatsStream(connection, target.nats.api, f"{name}-items", 1)
    try:
        await connection.open()
        found = {part: await _info(stream, f"STREAM.INFO.{name}-{part}") for part in ("items", "fence", "locks")}
        consumer = await _info(stream, f"CONSUMER.INFO.{name}-items.{WORKERS}")
    except ServerTooOld as e:
        notes.say("streams", Level.BAD, str(e))
        return notes.checks
    except BufstoreError as e:
        notes.say("streams", Level.BAD, str(e), "permit STREAM.INFO and CONSUMER.INFO")
        return notes.checks
    finally:
        await connection.aclose()
    there = [part for part, info in found.items() if info is not None]
    whole = "fence" in there if "items" in there else "locks" in there and "fence" not in there
    notes.require("streams", whole, ", ".join(there) or "none", "the next ExclusiveWork.open makes what is missing")
    for part in there:
        _stream(notes, part, found[part])
    if found["items"] is not None:
        _items(notes, found["items"], consumer)
    return notes.checks


async def _info(stream: NatsStream, verb: str) -> Any:
    try:
        return await stream.api(verb)
    except (StreamMissing, ConsumerMissing):
        return None


def _stream(notes: Notes, part: str, info: Any) -> None:
    config, peers = info["config"], (info.get("cluster") or {}).get("replicas") or []
    away = [peer["name"] for peer in peers if peer.get("offline") or not peer.get("current")]
    kept = f"{config.get('num_replicas', 1)} replicas on {config['storage']}"
    if away:
        kept += f", behind or away: {', '.join(away)}"
    notes.require(f"{part} copies", not away and config["storage"] == "file", kept, "a restart loses what is in memory")


def _items(notes: Notes, info: Any, consumer: Any) -> None:
    limit = info["config"].get("max_bytes", -1)
    notes.room("items room", info["state"]["bytes"], limit, _FULL, "raise max_bytes, or run more workers")
    if consumer is None:
        notes.say("consumer", Level.BAD, "there is none", "a worker that asks for work makes it, or the next open")
        return
    oldest, ttl_s = oldest_s(info), consumer["config"]["ack_wait"] / 1e9
    untold, pulls = consumer["num_pending"], consumer["num_waiting"]
    told = f"oldest: {lasting(oldest)}; {untold} not delivered yet, {pulls} pulls waiting"
    notes.require("items waiting", oldest < _OLD * ttl_s, told, "see who holds its key (`bufstore tokens who`)")
