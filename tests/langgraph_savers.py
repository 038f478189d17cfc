"""Makes savers for the tests: in memory, or on real servers with tables of the test's own."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import psycopg
import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, empty_checkpoint
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg.conninfo import make_conninfo

from bufstore import BufferConfig, LogConfig
from bufstore.embedded import Servers
from bufstore.langgraph import AsyncBufferedSaver, MemoryCheckpointStore, PostgresCheckpointStore
from bufstore.memory import MemoryNats
from bufstore.types import Receipt

#: Opens a saver for an ``async with`` block.
MakeSaver = Callable[..., AbstractAsyncContextManager[AsyncBufferedSaver]]


def config(thread_id: str, checkpoint_id: str | None = None, ns: str = "") -> RunnableConfig:
    """Return the configuration that names a thread, or one of its checkpoints."""
    named: dict[str, Any] = {"thread_id": thread_id, "checkpoint_ns": ns}
    return {"configurable": named | ({"checkpoint_id": checkpoint_id} if checkpoint_id else {})}


def checkpoint(versions: dict[str, Any], values: dict[str, Any], id_: str | None = None) -> Checkpoint:
    """Return a checkpoint with these channel versions and values."""
    made = empty_checkpoint()
    return {**made, "id": id_ or made["id"], "v": 4, "channel_versions": versions, "channel_values": values}


#: The metadata of a checkpoint that a loop makes.
META: Any = {"source": "loop", "step": 1, "parents": {}}


class Place:
    """A log and tables of one test; opens any number of savers (instances) on them."""

    def __init__(self, servers: Servers | None, *, lanes: int = 1) -> None:
        name = f"lg{secrets.token_hex(5)}"
        self.schema = name
        names = {"stream": f"LG-{name}", "bucket": f"lg-{name}", "subject": name}
        self.log = LogConfig(**names, partitions=2, max_bytes=64 << 20, lanes=lanes)
        self.nats: Any = servers.nats.url if servers is not None else MemoryNats()
        self.dsn = servers.postgres.dsn if servers is not None else ""
        self._memory = MemoryCheckpointStore()

    def store(self, **options: Any) -> Any:
        """Return the store behind the savers."""
        if not self.dsn:
            self._memory.history = options.get("history", self._memory.history)
            return self._memory
        names = {"schema": self.schema, "buffer_schema": f"{self.schema}_b"}
        return PostgresCheckpointStore(self.dsn, pool_size=4, **names, **options)

    @asynccontextmanager
    async def saver(self, *, flush: float | None = None, **options: Any) -> AsyncIterator[AsyncBufferedSaver]:
        """Open a saver. `flush`: the probability of a flush after each write; there is no flush by time then."""
        names = ("serde", "consistency", "new_threads", "on_conflict", "cache_bytes", "nats")
        ours = {name: options.pop(name) for name in names if name in options}
        interval = {"flush_interval_s": 0.02 if flush is None else 3600.0}
        store = self.store(**({"history": options.pop("history")} if "history" in options else {}))
        buffer = BufferConfig.fitting(self.log, **({"lease_s": 4} | interval | options))
        saver = await AsyncBufferedSaver.open(store, **({"nats": self.nats} | ours), config=buffer)
        if flush is not None:
            flush_now_and_then(saver, flush)
        try:
            yield saver
        finally:
            await saver.aclose()

    @asynccontextmanager
    async def plain(self) -> AsyncIterator[AsyncPostgresSaver]:
        """Open LangGraph's own saver on the same tables."""
        dsn = make_conninfo(self.dsn, options=f"-c search_path={self.schema}")
        async with AsyncPostgresSaver.from_conn_string(dsn) as saver:
            yield saver


def flush_now_and_then(saver: AsyncBufferedSaver, likely: float) -> None:
    """Flush after each write with this probability."""
    engine, chance = saver.engine, random.Random(7)

    async def written(_: Receipt) -> None:
        if chance.random() < likely:
            await engine.lanes.force_flush_all()

    after_each_append(saver, written)


def after_each_append(saver: AsyncBufferedSaver, written: Callable[[Receipt], Awaitable[None]]) -> None:
    """Call this with the receipt of each entry that the saver appends."""
    for lane in saver.engine.all:
        lane.append = partial(_appended, lane.append, written)  # type: ignore[method-assign]


async def _appended(
    append: Callable[..., Awaitable[Receipt]],
    written: Callable[[Receipt], Awaitable[None]],
    thread_id: str,
    operation: Any,
    **options: Any,
) -> Receipt:
    receipt = await append(thread_id, operation, **options)
    await written(receipt)
    return receipt


def where(place: Place) -> dict[str, Any]:
    """Return the environment that tells commands where a saver's log and tables are."""
    return {
        "BUFSTORE_NATS": place.nats,
        "BUFSTORE_POSTGRES": place.dsn,
        "BUFSTORE_STREAM": place.log.stream,
        "BUFSTORE_BUCKET": place.log.bucket,
        "BUFSTORE_SCHEMA": f"{place.schema}_b",
    }


async def command(place: Place, *arguments: str, code: int | None = 0) -> Any:
    """Return the result of `bufstore … --json`. `code`: the expected exit code; None for any."""
    environment = {**os.environ, **where(place)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "bufstore.cli", *arguments, "--json"),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    printed, errors = await asyncio.wait_for(process.communicate(), 60)
    assert code in (process.returncode, None), (printed.decode(), errors.decode())
    return json.loads(printed)


def asked_of(saver: AsyncBufferedSaver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the names of the queries that Postgres gets from now on."""
    asked: list[str] = []
    store: Any = saver.engine._store
    read = store._sql.read

    async def noted(name: str, *rest: Any) -> Any:
        asked.append(name)
        return await read(name, *rest)

    monkeypatch.setattr(store._sql, "read", noted)
    return asked


async def rows_looked_at(place: Place, statement: str, *parameters: Any) -> dict[str, int]:
    """Return how many rows of each table a statement looks at, those that it then drops included; tables of none go."""
    return await _rows_of("Relation Name", place, statement, *parameters)


async def rows_of_queries(place: Place, statement: str, *parameters: Any) -> dict[str, int]:
    """Return the same for the statement's WITH queries."""
    return await _rows_of("CTE Name", place, statement, *parameters)


async def _rows_of(kind: str, place: Place, statement: str, *parameters: Any) -> dict[str, int]:
    names = {f"p{number}": value for number, value in enumerate(parameters, 1)}
    for number in range(len(parameters), 0, -1):
        statement = statement.replace(f"${number}", f"%(p{number})s")
    async with await psycopg.AsyncConnection.connect(place.dsn) as connection:
        cursor = await connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", names)  # type: ignore[arg-type]
        ((plans,),) = await cursor.fetchall()
    seen: Counter[str] = Counter()
    nodes = [plans[0]["Plan"]]
    for node in nodes:
        nodes += node.get("Plans", ())
        if kind in node:
            dropped = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
            seen[node[kind]] += round((node["Actual Rows"] + dropped) * node["Actual Loops"])
    return dict(+seen)
