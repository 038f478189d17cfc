"""In a Python worker of Spark: one event loop and one store for all batches, as long as the worker lives.

Spark keeps its workers between batches and ends them when idle, without a word. So what a task writes is durable before
it ends, and a store that was lost is made again.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from bufstore.config import BufferConfig
from bufstore.errors import BufstoreError, Rejected
from bufstore.postgres.store import PostgresThreadStore
from bufstore.spark.config import SinkConfig
from bufstore.spark.rows import number_of, write_of
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.types import SourceMark

T = TypeVar("T")


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="bufstore-spark", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


_lock = threading.Lock()
#: By process (a fork must not use its parent's) and configuration.
_stores: dict[tuple[int, str], BufferedThreadStore] = {}
_loops: dict[int, _Loop] = {}


def _run(work: Coroutine[Any, Any, T]) -> T:
    with _lock:
        loop = _loops.setdefault(os.getpid(), _Loop()) if os.getpid() not in _loops else _loops[os.getpid()]
    return loop.run(work)


async def _store(config: SinkConfig) -> BufferedThreadStore:
    key = os.getpid(), f"{config.nats}{config.postgres}{config.schema}{config.log}"
    store = _stores.get(key)
    if store is None:
        buffer = BufferConfig(log=config.log, flusher=False, append_timeout_s=config.append_timeout_s)
        inner = PostgresThreadStore(config.postgres, schema=config.schema, pool_size=4)
        store = _stores[key] = await BufferedThreadStore.open(inner, nats=list(config.nats), config=buffer)
    return store


def write_rows(config: SinkConfig, batch_id: int, rows: Sequence[dict[str, Any]]) -> tuple[int, int, list[str]]:
    """Write a task's rows, sorted by thread: how many were written, how many were there already, and what is wrong with
    the rest. Raises BufstoreError when it is not the rows' fault: the task is tried again."""
    return _run(_write(config, batch_id, rows))


async def _write(config: SinkConfig, batch_id: int, rows: Sequence[dict[str, Any]]) -> tuple[int, int, list[str]]:
    store = await _store(config)
    threads: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        threads.setdefault(row["thread_id"], []).append(row)
    room = asyncio.Semaphore(config.in_flight)
    written = repeated = 0
    bad: list[str] = []

    async def one_thread(of_thread: list[dict[str, Any]]) -> None:
        nonlocal written, repeated
        for rank, row in enumerate(of_thread):
            try:
                wanted = write_of(row)
                mark = SourceMark(config.app_id, number_of(batch_id, rank))
                call = store.checkpoint if wanted.whole else store.checkpoint_append
                async with room:
                    receipt = await call(wanted.thread_id, wanted.messages, wanted.run, source=mark)
            except Rejected as e:
                bad.append(f"{row['thread_id']!r}: {e}")
                continue
            written += not receipt.repeated
            repeated += receipt.repeated

    try:
        async with asyncio.TaskGroup() as group:
            for of_thread in threads.values():
                group.create_task(one_thread(of_thread))
    except* BufstoreError as e:
        raise e.exceptions[0] from None  # one says enough, and Spark shows it
    return written, repeated, bad
