"""Contestants of the mailbox: ours on each store, and procrastinate on the same Postgres.

A *cycle* is enqueue, claim and ack of one dispatch; each caller has its own thread (for procrastinate: a queue). Of
procrastinate only the calls of a worker for one job are made: defer, fetch, finish, each a round trip, no polling.
"""

from __future__ import annotations

import asyncio
import gc
import time
from importlib import import_module
from typing import Any

import psycopg

from bench.contestant import Contestant, body, closed_loop, summary
from bufstore.mailbox import (
    MailboxConfig,
    MemoryMailboxStore,
    NatsMailboxNames,
    NatsMailboxStore,
    PostgresMailboxStore,
)
from bufstore.mailbox.nats import NatsBackend
from bufstore.mailbox.store import MailboxStore

_CONFIG = MailboxConfig(timeout_s=60.0)
#: Bytes of a dispatch, which only names the work.
_PAYLOAD = 256


class OursMailbox(Contestant):
    """Base of our three."""

    store: MailboxStore

    async def open(self) -> None:
        self.store = self.make()
        await self.store.backend.open()

    def make(self) -> MailboxStore:
        raise NotImplementedError

    async def close(self) -> None:
        await self.store.aclose()

    async def step(self, thread: str, number: int) -> Any:
        await self.store.enqueue(thread, body(number)[:_PAYLOAD])
        claim = await self.store.claim(thread, "bench")
        assert claim is not None
        await self.store.ack(claim)

    async def fill(self, thread: str, count: int) -> None:
        """Queue `count` dispatches in one thread."""
        for start in range(0, count, 500):
            part = range(start, min(start + 500, count))
            await asyncio.gather(*(self.store.enqueue(thread, body(n)[:_PAYLOAD]) for n in part))

    async def claims(self, thread: str, count: int) -> dict[str, float]:
        """Claim `count` times, one after the other, at the same queue depth; return percentiles of the claim alone."""
        latencies: list[float] = []
        gc.collect()
        began = time.perf_counter()
        for number in range(count):
            at = time.perf_counter()
            claim = await self.store.claim(thread, "bench")
            latencies.append(time.perf_counter() - at)
            assert claim is not None
            await self.store.ack(claim)
            await self.store.enqueue(thread, body(number)[:_PAYLOAD])
        return summary(latencies, count, time.perf_counter() - began)


class MemoryQueue(OursMailbox):
    """In memory, not durable: the cost of the shared code."""

    def make(self) -> MailboxStore:
        return MemoryMailboxStore(config=_CONFIG)


class NatsQueue(OursMailbox):
    """One bucket."""

    def make(self) -> MailboxStore:
        names = NatsMailboxNames(bucket=f"mailbox-{self.place.name}", max_bytes=2 << 30)
        return NatsMailboxStore(self.place.nats, names=names, config=_CONFIG)

    async def close(self) -> None:
        assert isinstance(self.store.backend, NatsBackend)
        stream = self.store.backend._stream
        await stream.api(f"STREAM.DELETE.{stream.name}")
        await super().close()


class PostgresQueue(OursMailbox):
    """Tables in its own schema, 16 connections."""

    @property
    def _schema(self) -> str:
        return f"mailbox_{self.place.name}"

    def make(self) -> MailboxStore:
        return PostgresMailboxStore(self.place.dsn, schema=self._schema, pool_size=16, config=_CONFIG)

    async def close(self) -> None:
        await super().close()
        await _drop(self.place.dsn, self._schema)


class Procrastinate(Contestant):
    """The job manager of procrastinate, 16 connections."""

    async def open(self) -> None:
        procrastinate: Any = import_module("procrastinate")  # imported only where this row runs

        self._schema = f"procrastinate_{self.place.name}"
        async with await psycopg.AsyncConnection.connect(self.place.dsn, autocommit=True) as connection:
            await connection.execute(f"CREATE SCHEMA {self._schema}")
        connector = procrastinate.PsycopgConnector(
            conninfo=self.place.dsn, min_size=16, max_size=16, kwargs={"options": f"-c search_path={self._schema}"}
        )
        self._app = procrastinate.App(connector=connector)
        await self._app.open_async()
        await self._app.schema_manager.apply_schema_async()
        self._jobs = self._app.job_manager
        self._worker = await self._jobs.register_worker()
        self._done = procrastinate.jobs.Status.SUCCEEDED

    async def close(self) -> None:
        await self._app.close_async()
        await _drop(self.place.dsn, self._schema)

    async def step(self, thread: str, number: int) -> Any:
        task = self._app.configure_task("bench", queue=thread, allow_unknown=True)
        await task.defer_async(text=body(number)[:_PAYLOAD].decode("latin-1"))
        job = await self._jobs.fetch_job(queues=[thread], worker_id=self._worker)
        assert job is not None
        await self._jobs.finish_job(job, status=self._done, delete_job=False)

    async def load(self, callers: int, seconds: float, label: str) -> dict[str, float]:
        return await closed_loop(lambda who, number: self.step(f"{label}-{who}", number), callers, seconds)


async def _drop(dsn: str, schema: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(f"DROP SCHEMA {schema} CASCADE")
