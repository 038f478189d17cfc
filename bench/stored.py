"""A row counts only what is stored: the servers say, outside the clock, how many bytes came to them.

Otherwise a store that acknowledges and keeps nothing would be the fastest of all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import psycopg

from bench.baselines.raw_nats import ELECTION_S, LOOK_S, RawNats
from bench.contestant import PAYLOAD, Place

T = TypeVar("T")
#: What a message may take at least, as a share of its bytes. Postgres compresses, and this text to a half; what comes
#: to its log is more than the messages (full pages), so that it shows only a store that keeps next to nothing.
_LEAST = {"nats": 1.0, "postgres": 0.25}


class NotStored(Exception):
    """Less was stored than was acknowledged, so the figures would be of nothing."""


def stored(place: Place, server: str, load: Callable[[], T], done: Callable[[T], float], size: int = PAYLOAD) -> T:
    """Run `load` and return its result, of which `done` says how many messages of `size` bytes it stored at least.

    `server` is "nats" or "postgres". Raises NotStored if fewer bytes came to it.
    """
    before = _bytes(place, server)
    found = load()
    came, acknowledged = _bytes(place, server) - before, done(found)
    if came < acknowledged * size * _LEAST[server]:
        raise NotStored(f"{acknowledged:.0f} messages of {size} bytes were acknowledged, and {server} got {came} bytes")
    return found


def _bytes(place: Place, server: str) -> int:
    if server == "nats":
        return asyncio.run(_in_streams(place.nats))
    with psycopg.connect(place.dsn, autocommit=True) as connection:
        found = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchone()
        assert found is not None
        return int(found[0])


async def _in_streams(url: str) -> int:
    nats = await RawNats.connect(url)
    try:
        # Of each stream what its leader has, whatever its replicas; one that elects a leader is missing. There are
        # fewer than one answer holds.
        async with asyncio.timeout(ELECTION_S):
            while (found := await nats.ask("$JS.API.STREAM.LIST")).get("missing"):  # noqa: ASYNC110 - nobody tells us
                await asyncio.sleep(LOOK_S)
    finally:
        nats.close()
    streams = found["streams"] or ()
    assert len(streams) == found["total"], f"{len(streams)} of {found['total']} streams"
    return sum(int(stream["state"]["bytes"]) for stream in streams)
