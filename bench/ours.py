"""*ours*: the buffered store in its own process, as a writer, a flusher, or both.

Where a row measures appends, the process only writes (``flusher=False``), and another process flushes, or none does, as
the row says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from bench.contestant import PAYLOAD, Contestant, Place, text
from bench.workload import texts
from bufstore import BufferConfig, BufferedThreadStore, LogConfig, PostgresThreadStore, Run

_LOOK_S = 0.02


class Ours(Contestant):
    """A BufferedThreadStore. `options` are those of BufferConfig; `bucket` and `schema` replace the place's own."""

    #: How many logs it writes to.
    lanes = 1

    def __init__(self, place: Place, *, bucket: str = "", schema: str = "", **options: Any) -> None:
        super().__init__(place)
        self.schema = schema or place.name
        self.config = BufferConfig(
            log=LogConfig(
                stream=f"LOG-{place.name}",
                bucket=bucket or f"hot-{place.name}",
                subject=place.name,
                replicas=place.replicas,
                max_bytes=place.log_bytes // self.lanes,
                lanes=self.lanes,
            ),
            **{"append_timeout_s": 30.0, "flusher": False} | options,
        )

    async def open(self) -> None:
        inner = PostgresThreadStore(self.place.dsn, schema=self.schema)
        self.store = await BufferedThreadStore.open(inner, nats=self.place.nats, config=self.config)

    async def close(self) -> None:
        await self.store.aclose()

    async def step(self, thread: str, number: int) -> Any:
        return await self.store.checkpoint_append(thread, [text(number)], run_of(thread))

    async def flush(self) -> None:
        """Wait until everything is in Postgres."""
        await self.store.force_flush_all(timeout_s=600)

    async def flusher(self) -> dict[str, Any]:
        """Return the statistics of this process's flusher."""
        # `statistics` would also count what is not flushed, for which a new process reads the log.
        flusher = self.store.buffer.flusher
        assert flusher is not None, "this process only writes"
        return asdict(flusher.state)

    async def until(self, reached: Callable[[Mapping[str, Any]], bool]) -> None:
        """Wait until the state of this process's flusher satisfies `reached`."""
        while not reached(await self.flusher()):  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(_LOOK_S)

    async def log_bytes(self) -> int:
        """Return the bytes in the log."""
        return (await self.store.statistics()).log_bytes

    async def fill(self, threads: int, each: int, at_once: int, size: int = PAYLOAD, label: str = "t") -> None:
        """Write `each` checkpoints of one message of `size` bytes to each of `threads` threads."""
        messages = texts(size)
        waiting = iter(range(threads))

        async def writer() -> None:
            for number in waiting:
                thread = f"{label}-{number}"
                for step in range(each):
                    message = messages[(number + step) % len(messages)]
                    await self.store.checkpoint_append(thread, [message], run_of(thread))

        await asyncio.gather(*(writer() for _ in range(at_once)))


def run_of(thread: str) -> Run:
    """Return the run that a benchmark saves with the thread."""
    return Run(run_id=f"run-of-{thread}", thread_id=thread)
