"""`tokens.*`: exclusive work on distinct keys and on one hot key, and locks; the handlers do nothing.

The baseline, a JetStream work queue with nats-py, has no exclusion and no tokens: the difference is their cost.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator

import nats
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy
from psycopg import AsyncConnection

from bench.results import Benchmark, compared
from bench.stage import Stage
from bufstore.tokens import ExclusiveWork, Locks, Task, TokensConfig

_HOT_ITEMS = 12
_KEYS = 2000
_CONCURRENCY = 32
_LOCKS = 500
_ROUNDS_MAX = 3


def tokens(stage: Stage) -> Iterator[Benchmark]:
    """Measure submitting, then working off, and locks one after another."""
    keys, hot = stage.count(_KEYS, 50), stage.count(_HOT_ITEMS, 2)
    found: dict[str, dict[str, list[float]]] = {"hot_key": {}, "submitted": {}, "worked": {}}
    locks: dict[str, list[float]] = {"ours": [], "row in Postgres": []}
    count = stage.count(_LOCKS, 20)
    for _ in range(min(stage.rounds, _ROUNDS_MAX)):
        for what, value in asyncio.run(_measure(stage.servers.nats, keys, hot)).items():
            found[what].setdefault("ours", []).append(value)
        for what, value in asyncio.run(_work_queue(stage.servers.nats, keys)).items():
            found[what].setdefault("work queue", []).append(value)
        locks["ours"].append(asyncio.run(_locks(stage.servers.nats, count)))
        locks["row in Postgres"].append(asyncio.run(_rows(stage.servers.dsn, count)))
    found["hot_key"]["2 s"] = [2.0]
    yield compared("tokens.hot_key", "s", found["hot_key"])
    yield compared("tokens.submitted_distinct_keys", "1/s", found["submitted"])
    yield compared("tokens.worked_distinct_keys", "1/s", found["worked"])
    yield compared("tokens.lock_and_release", "1/s", locks)


async def _measure(url: str, keys: int, hot_items: int) -> dict[str, float]:
    async with await ExclusiveWork.open(url, TokensConfig(name=f"bench-{secrets.token_hex(4)}")) as work:
        for i in range(hot_items):
            await work.submit("hot", str(i).encode())
        hot = await _work_off(work, hot_items, 4)
        began = time.perf_counter()
        for i in range(0, keys, _CONCURRENCY):
            await asyncio.gather(*(work.submit(f"key {n}") for n in range(i, min(i + _CONCURRENCY, keys))))
        submitted = keys / (time.perf_counter() - began)
        return {"hot_key": hot, "submitted": submitted, "worked": keys / await _work_off(work, keys, _CONCURRENCY)}


async def _work_off(work: ExclusiveWork, items: int, concurrency: int) -> float:
    """Return the seconds that it takes to work off `items` items."""
    stopping, left = asyncio.Event(), items

    async def handler(task: Task) -> None:
        nonlocal left
        left -= 1
        if not left:
            stopping.set()

    began = time.perf_counter()
    async with asyncio.timeout(300):
        await work.run(handler, stopping, concurrency=concurrency)
    return time.perf_counter() - began


async def _work_queue(url: str, keys: int) -> dict[str, float]:
    client = await nats.connect(url)
    try:
        stream, name = client.jetstream(), f"bench-{secrets.token_hex(4)}"
        await stream.add_stream(name=name, subjects=[f"{name}.*"], retention=RetentionPolicy.WORK_QUEUE)
        began = time.perf_counter()
        for i in range(0, keys, _CONCURRENCY):
            await asyncio.gather(*(stream.publish(f"{name}.{n}") for n in range(i, min(i + _CONCURRENCY, keys))))
        submitted = keys / (time.perf_counter() - began)
        # Each worker has its own: with a shared one, a worker takes messages that another requested and waits for.
        subscriptions = [await stream.pull_subscribe(f"{name}.*", "workers") for _ in range(_CONCURRENCY)]
        left = keys

        async def worker(pull: JetStreamContext.PullSubscription) -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await (await pull.fetch(1, timeout=60))[0].ack_sync()

        began = time.perf_counter()
        await asyncio.gather(*(worker(pull) for pull in subscriptions))
        return {"submitted": submitted, "worked": keys / (time.perf_counter() - began)}
    finally:
        await client.close()


async def _locks(url: str, count: int) -> float:
    async with await Locks.open(url, name=f"bench-{secrets.token_hex(4)}") as locks:
        began = time.perf_counter()
        for _ in range(count):
            await (await locks.acquire("one")).release()
        return count / (time.perf_counter() - began)


async def _rows(dsn: str, count: int) -> float:
    """A lock as a row that expires, as people would write it."""
    table = f"locks_{secrets.token_hex(4)}"
    take = f"""
        INSERT INTO {table} VALUES ('one', now() + interval '10 s') ON CONFLICT (key) DO UPDATE
        SET until = excluded.until WHERE {table}.until < now()"""
    async with await AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(f"CREATE TABLE {table} (key text PRIMARY KEY, until timestamptz NOT NULL)")
        began = time.perf_counter()
        for _ in range(count):
            await connection.execute(take)
            await connection.execute(f"DELETE FROM {table} WHERE key = 'one'")
        rate = count / (time.perf_counter() - began)
        await connection.execute(f"DROP TABLE {table}")
        return rate
