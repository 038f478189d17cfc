"""The kinds of fault: each an async context that injects at its beginning and heals at its end.

Faults that touch the same thing are not injected together. Each gets the site and its own random source, so that the
seed alone decides what it hits. The fault yields a note for the record once it is in effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import psycopg

from bufstore.buffer.entry import Base, Entry, encode
from bufstore.buffer.places import group_of
from chaos.site import FAILOVER_WINDOW_S, LEASE_S, LOG, PARTITIONS, Process, Site
from helpers import eventually

Inject = Callable[[Site, random.Random], AbstractAsyncContextManager[str]]


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    name: str
    #: Kinds that share a word exclude each other.
    touches: frozenset[str]
    inject: Inject
    #: Injected without any other fault, because its effect is measured.
    alone: bool = False
    #: True when the fault can be injected on this site.
    possible: Callable[[Site], bool] = lambda _: True


KINDS: dict[str, Kind] = {}


def _kind(
    name: str, *touches: str, alone: bool = False, possible: Callable[[Site], bool] = lambda _: True
) -> Callable[[Callable[[Site, random.Random], AsyncIterator[str]]], Inject]:
    def register(function: Callable[[Site, random.Random], AsyncIterator[str]]) -> Inject:
        inject = asynccontextmanager(function)
        KINDS[name] = Kind(name, frozenset(touches), inject, alone, possible)
        return inject

    return register


# --- processes ----------------------------------------------------------------------------------------------------


def _one(site: Site, chance: random.Random, role: str) -> Process:
    return chance.choice([p for p in site.processes if p.role == role])


def _killing(role: str, *, alone: bool) -> None:
    @_kind(f"kill {role}", role, alone=alone)
    async def kill(site: Site, chance: random.Random) -> AsyncIterator[str]:
        process = _one(site, chance, role)
        if role == "flusher":
            process = await _kill_and_measure(site, process)
        else:
            await process.kill()
        try:
            yield process.name
        finally:
            await process.start()


async def _kill_and_measure(site: Site, process: Process) -> Process:
    """Kill a flusher that owns partitions, and measure how long they are not flushed."""
    before = {p: seq for p, (_, seq) in (await site.persist(site.cursors)).items()}
    owners = await site.persist(site.owners)

    def owned(by: Process) -> set[int]:
        started = site.started(by)
        return {p for p, owner in owners.items() if started is not None and owner in started.members}

    others = [p for p in site.processes if p.role == process.role]
    process = next((p for p in (process, *others) if owned(p)), process)
    missing = owned(process)
    await process.kill()
    killed = time.monotonic()
    await asyncio.sleep(0.5)  # leaves time for entries that it cannot have flushed
    ends = await site.persist(site.ends)

    async def flushed() -> bool:
        now = await site.persist(site.cursors)
        return all(now[p][1] >= ends.get(p, before[p]) for p in missing)

    with contextlib.suppress(TimeoutError):
        await eventually(flushed, 30)
    if missing:
        site.flusher_kills.append(time.monotonic() - killed)
    return process


def _stopping(role: str) -> None:
    @_kind(f"stop {role}", role)
    async def stop(site: Site, chance: random.Random) -> AsyncIterator[str]:
        process = _one(site, chance, role)
        process.send(signal.SIGSTOP)
        if role == "flusher":
            await asyncio.sleep(LEASE_S + 1)  # another owner takes over, and this one wakes up as a zombie
        try:
            yield process.name
        finally:
            process.send(signal.SIGCONT)


for _role in ("writer", "flusher", "reader", "all"):
    _killing(_role, alone=_role in ("writer", "flusher"))
    _stopping(_role)


@_kind("clock steps", "clock")
async def _clock(site: Site, chance: random.Random) -> AsyncIterator[str]:
    # A process that has just started has no handler yet, and the signal would end it.
    chosen = [p for p in site.processes if chance.random() < 0.7 and site.started(p) is not None]
    for process in chosen:
        process.send(signal.SIGUSR1)
    yield " ".join(p.name for p in chosen)


# --- servers ------------------------------------------------------------------------------------------------------


def _serving(name: str) -> None:
    @_kind(f"restart {name}", name)
    async def restart(site: Site, chance: random.Random) -> AsyncIterator[str]:
        server = getattr(site.servers, name)
        await asyncio.to_thread(server.stop)
        try:
            yield ""
        finally:
            await asyncio.to_thread(server.start)

    @_kind(f"kill {name}", name)
    async def kill(site: Site, chance: random.Random) -> AsyncIterator[str]:
        server = getattr(site.servers, name)
        await asyncio.to_thread(server.kill)
        try:
            yield ""
        finally:
            await asyncio.to_thread(server.start)

    @_kind(f"stop {name}", name)
    async def stop(site: Site, chance: random.Random) -> AsyncIterator[str]:
        server = getattr(site.servers, name)
        await asyncio.to_thread(server.pause)
        try:
            yield ""
        finally:
            await asyncio.to_thread(server.resume)


_serving("nats")
_serving("postgres")


# --- the network --------------------------------------------------------------------------------------------------


def _network(name: str, server: str, begin: Callable[[Site, random.Random, str], None]) -> None:
    """Register a fault of one server's proxies: the clients', the flushers', or both."""

    @_kind(name, f"net {server}")
    async def fault(site: Site, chance: random.Random) -> AsyncIterator[str]:
        sides = chance.choice((["clients"], ["flushers"], ["clients", "flushers"]))
        for side in sides:
            begin(site, chance, f"{server} {side}")
        try:
            yield " and ".join(sides)
        finally:
            for side in sides:
                site.proxies[f"{server} {side}"].heal()


def _cut(site: Site, chance: random.Random, proxy: str) -> None:
    site.proxies[proxy].refuse = chance.random() < 0.7
    site.proxies[proxy].cut()


def _drop_replies(site: Site, chance: random.Random, proxy: str) -> None:
    site.proxies[proxy].drop_replies = True


def _slow(site: Site, chance: random.Random, proxy: str) -> None:
    for flow in (site.proxies[proxy].to_server, site.proxies[proxy].to_client):
        flow.delay_s = chance.uniform(0.02, 0.3)


def _narrow(site: Site, chance: random.Random, proxy: str) -> None:
    for flow in (site.proxies[proxy].to_server, site.proxies[proxy].to_client):
        flow.bytes_per_s = chance.uniform(20_000, 200_000)


def _half_open(site: Site, chance: random.Random, proxy: str) -> None:
    chance.choice((site.proxies[proxy].to_server, site.proxies[proxy].to_client)).hold()


def _lossy(site: Site, chance: random.Random, proxy: str) -> None:
    chance.choice((site.proxies[proxy].to_server, site.proxies[proxy].to_client)).swallow = True


for _server in ("nats", "postgres"):
    _network(f"cut {_server}", _server, _cut)
    _network(f"slow link to {_server}", _server, _slow)
    _network(f"narrow link to {_server}", _server, _narrow)
    _network(f"half-open link to {_server}", _server, _half_open)
    _network(f"bytes to or from {_server} lost", _server, _lossy)
_network("publish acks lost", "nats", _drop_replies)
_network("replies to COMMIT lost", "postgres", _drop_replies)


# --- the servers' data --------------------------------------------------------------------------------------------


@_kind("stream full", "nats")
async def _stream_full(site: Site, chance: random.Random) -> AsyncIterator[str]:
    stream = site.one_of(chance).stream
    info = await site.persist(lambda: site.api(f"STREAM.INFO.{stream}"))
    limit = info["state"]["bytes"] + chance.randint(10_000, 100_000)
    await site.persist(lambda: site.api(f"STREAM.UPDATE.{stream}", info["config"] | {"max_bytes": limit}))
    try:
        yield f"{stream}: {limit} bytes"
    finally:
        wide = info["config"] | {"max_bytes": LOG["max_bytes"]}
        await site.persist(lambda: site.api(f"STREAM.UPDATE.{stream}", wide))


@_kind("disk of Postgres full", "postgres", possible=lambda site: site.small_disk is not None)
async def _disk_full(site: Site, chance: random.Random) -> AsyncIterator[str]:
    assert site.small_disk is not None
    ballast = site.small_disk / "ballast"
    size = 0

    def fill() -> None:
        nonlocal size
        with ballast.open("wb") as file:
            for piece in (16 << 20, 1 << 20, 64 << 10, 4 << 10):
                with contextlib.suppress(OSError):  # no space left
                    while True:
                        os.posix_fallocate(file.fileno(), size, piece)
                        size += piece

    await asyncio.to_thread(fill)
    try:
        yield f"{size} bytes were free"
    finally:
        ballast.unlink()


@_kind("consumers deleted", "nats")
async def _consumers(site: Site, chance: random.Random) -> AsyncIterator[str]:
    stream = site.one_of(chance).stream
    names = (await site.persist(lambda: site.api(f"CONSUMER.NAMES.{stream}"))).get("consumers") or []
    for name in names:
        await site.persist(partial(_deleted, site, f"CONSUMER.DELETE.{stream}.{name}"))
    yield f"{stream}: {len(names)} consumers"


@_kind("hot bucket deleted", "nats")
async def _bucket(site: Site, chance: random.Random) -> AsyncIterator[str]:
    bucket = site.one_of(chance).bucket
    await site.persist(partial(_deleted, site, f"STREAM.DELETE.KV_{bucket}"))
    yield bucket


async def _deleted(site: Site, request: str) -> None:
    with contextlib.suppress(RuntimeError):  # its owner has deleted it already, or the request before
        await site.api(request)


@_kind("flushed entries purged", "nats")
async def _purged(site: Site, chance: random.Random) -> AsyncIterator[str]:
    """Purge as an operator may: only groups below the cursor that were flushed longer ago than the failover window."""
    lane = site.one_of(chance)
    old = [c for t, c in site.cursor_past if t < time.monotonic() - FAILOVER_WINDOW_S]
    ours = [old[-1][p] for p in map(lane.partition, range(PARTITIONS)) if p in old[-1]] if old else []
    count = 0
    if len(ours) == PARTITIONS and (below := group_of(min(seq for _, seq in ours))):
        count = (await site.persist(lambda: site.api(f"STREAM.PURGE.{lane.stream}", {"seq": below})))["purged"]
    yield f"{lane.stream}: {count} messages"


@_kind("poison published", "nats", "postgres")
async def _poison(site: Site, chance: random.Random) -> AsyncIterator[str]:
    lane = site.one_of(chance)
    rows = await site.persist(
        lambda: site.sql(
            f"SELECT thread_id FROM {lane.schema}.buffer_threads"
            " WHERE thread_id LIKE 'own-%' OR thread_id LIKE 'whole-%' ORDER BY flushed_seq DESC LIMIT 40"
        )
    )
    threads = [thread for (thread,) in rows]
    for thread in chance.sample(threads, min(4, len(threads))):
        body, header = _no_entry(chance)
        await site.publish(thread, body, header)
    await site.publish_among_groups(lane, b"nobody's")
    yield " ".join(threads[:4])


def _no_entry(chance: random.Random) -> tuple[bytes, str | None]:
    entry = Entry(
        id=chance.getrandbits(62) + 1, prev_id=1, base=Base.CHAINED, seen=0, version=1, self_contained=True, keys=b"",
        payload=b"a payload of no kind",
    )  # fmt: skip
    header, body = encode(entry)
    garbage = chance.randbytes(chance.randint(0, 2000))
    return chance.choice(
        [
            (garbage, None),
            (garbage, "1.00000000.AAAA"),
            (body[:-3], header),  # truncated
            (body, "9" + header[1:]),  # of a later release
            (body, header),  # readable up to its payload
        ]
    )


@_kind("rows locked", "postgres")
async def _locked(site: Site, chance: random.Random) -> AsyncIterator[str]:
    async with await psycopg.AsyncConnection.connect(site.servers.postgres.dsn) as connection:
        cursor = await connection.execute(
            f"SELECT thread_id FROM {site.one_of(chance).schema}.buffer_threads"
            " ORDER BY flushed_seq DESC LIMIT 20 FOR UPDATE"
        )
        rows = await cursor.fetchall()
        yield f"{len(rows)} threads"
        await connection.rollback()


@_kind("connections of Postgres terminated", "postgres")
async def _terminated(site: Site, chance: random.Random) -> AsyncIterator[str]:
    count = 0
    for _ in range(3):
        rows = await site.persist(
            lambda: site.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE backend_type = 'client backend' AND application_name = 'bufstore'"
            )
        )
        count += len(rows)
        await asyncio.sleep(0.2)
    yield f"{count} connections"
