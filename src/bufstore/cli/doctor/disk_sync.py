"""Whether NATS syncs its disk before it acknowledges. Only a system account or the monitoring port can tell."""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request
from pathlib import Path
from ssl import SSLContext

import msgspec
from nats.aio.msg import Msg

from bufstore.cli.doctor.diagnosis import CheckResult, Level, Notes
from bufstore.config import NatsConfig
from bufstore.errors import BufstoreError
from bufstore.jetstream.connection import Connection

_ANSWERS_S = 1.0
_WHAT = "sync of the disk"
_HOW = (
    "an application's account cannot see it: give --nats-sys (a user of the system account, in the URL or as "
    "--nats-sys-creds) or --nats-monitor (http://host:8222), or look for `sync_interval: always` in the server's "
    "configuration"
)
_LAZY = (
    "a power failure loses what was acknowledged since the last sync: set `sync_interval: always` in the server's "
    "jetstream block"
)
#: With this many replicas, the other servers still have what a power failure takes from one.
_REPLICAS = 3


class _Config(msgspec.Struct):
    """How a server syncs; it leaves out fields that are false or zero."""

    sync_always: bool = False
    sync_interval: int = 0


class _JetStream(msgspec.Struct):
    config: _Config | None = None


class _Server(msgspec.Struct):
    """What a server says of itself (/varz): the part that is needed here."""

    server_name: str = "?"
    jetstream: _JetStream | None = None


class _Answer(msgspec.Struct):
    """The same, as the answer to a system account."""

    data: _Server = msgspec.field(default_factory=_Server)


async def check_sync(
    sys_url: str | None,
    monitor_url: str | None,
    tls: SSLContext | None,
    known: str | None,
    replicas: int = 1,
    *,
    sys_credentials: Path | None = None,
) -> list[CheckResult]:
    """Check the sync of the disk. `known`: the sync interval of embedded servers. `replicas`: those of the log.

    `sys_credentials`: a file with which to sign in at `sys_url`.
    """
    notes = Notes("NATS")
    try:
        if known is not None:
            _judge(notes, [("embedded", known == "always", known)], replicas)
        elif sys_url is not None:
            _judge(notes, _syncs(await _ask_servers(sys_url, sys_credentials, tls)), replicas)
        elif monitor_url is not None:
            _judge(notes, _syncs([await asyncio.to_thread(_fetch, monitor_url, tls)]), replicas)
        elif replicas >= _REPLICAS:
            notes.say(_WHAT, Level.OK, f"unknown: {_enough(replicas)}")
        else:
            notes.say(_WHAT, Level.UNKNOWN, "unknown", _HOW)
    except (BufstoreError, OSError, ValueError) as e:
        notes.say(_WHAT, Level.UNKNOWN, f"could not be asked: {e}", _HOW)
    return notes.checks


def _syncs(servers: list[_Server]) -> list[tuple[str, bool, str]]:
    """Return for each server with JetStream its name, whether it always syncs, and how often it syncs otherwise."""
    return [
        (s.server_name, s.jetstream.config.sync_always, f"every {s.jetstream.config.sync_interval / 1e9:g} s")
        for s in servers
        if s.jetstream is not None and s.jetstream.config is not None
    ]


def _enough(replicas: int) -> str:
    return f"enough with {replicas} replicas, unless several of their servers lose power at once"


def _judge(notes: Notes, syncs: list[tuple[str, bool, str]], replicas: int) -> None:
    lazy = [f"{name}: lazy, {interval}" for name, always, interval in syncs if not always]
    if not syncs:
        notes.say(_WHAT, Level.UNKNOWN, "no server with JetStream answered", _HOW)
    elif lazy and replicas >= _REPLICAS:
        notes.say(_WHAT, Level.OK, f"{'; '.join(lazy)}: {_enough(replicas)}")
    elif lazy:
        notes.say(_WHAT, Level.WARNING, "; ".join(lazy), _LAZY)
    else:
        notes.say(_WHAT, Level.OK, f"always ({len(syncs)} servers)" if len(syncs) > 1 else "always")


async def _ask_servers(url: str, credentials: Path | None, tls: SSLContext | None) -> list[_Server]:
    """Ask the servers of the cluster; each answers for itself."""
    connection = Connection(NatsConfig(servers=(url,), credentials=credentials, tls=tls), "bufstore-doctor")
    await connection.open()
    found: list[_Server] = []

    async def heard(msg: Msg) -> None:
        if msg.data:
            found.append(msgspec.json.decode(msg.data, type=_Answer).data)

    try:
        client = connection.client()
        inbox = client.new_inbox()
        await client.subscribe(inbox, cb=heard)
        await client.publish("$SYS.REQ.SERVER.PING.VARZ", b"", reply=inbox)
        await asyncio.sleep(_ANSWERS_S)
    finally:
        await connection.aclose()
    return found


def _fetch(url: str, tls: SSLContext | None) -> _Server:
    if not url.startswith(("http://", "https://")):
        raise ValueError("the monitoring address begins with http:// or https://")
    request = urllib.request.Request(url.rstrip("/").removesuffix("/varz") + "/varz")  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=5, context=tls) as answer:  # noqa: S310
            return msgspec.json.decode(answer.read(), type=_Server)
    except http.client.HTTPException as e:  # the address has a space, or the answer is not HTTP
        raise OSError(f"the monitoring port does not answer: {type(e).__name__}") from None
    except urllib.error.URLError as e:
        raise OSError(f"the monitoring port does not answer: {e.reason}") from None
