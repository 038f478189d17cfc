"""A process that slept while others' entries were written, flushed and purged goes on from what Postgres has."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bufstore import BufferConfig, BufferedThreadStore, LogConfig, OutcomeUnknown, Run
from bufstore.buffer.subjects import Subjects
from bufstore.jetstream.messages import AppendUnknown, Outgoing
from bufstore.memory import MemoryNats
from bufstore.threads.memory_store import MemoryThreadStore
from unit.fake_log import run

SUBJECTS = Subjects("thread", 4)


@asynccontextmanager
async def process(nats: MemoryNats, inner: MemoryThreadStore, **options: Any) -> AsyncIterator[BufferedThreadStore]:
    log = LogConfig(subject=SUBJECTS.prefix, partitions=SUBJECTS.partitions, failover_window_s=20.0)
    config = BufferConfig(log=log, append_timeout_s=2.0, retain_after_flush_s=20.0, **options)
    async with await BufferedThreadStore.open(inner, nats=nats, config=config) as store:
        yield store


def lose_next(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the next group of this process on its way to the log, without an answer."""
    stream = store.buffer.session.stream
    publish = stream.publish

    async def lost(message: Outgoing, timeout_s: float) -> int:
        if message.subject != SUBJECTS.groups:
            return int(await publish(message, timeout_s))
        monkeypatch.setattr(stream, "publish", publish)
        raise AppendUnknown("no answer")

    monkeypatch.setattr(stream, "publish", lost)


@pytest.mark.parametrize("lost", [False, True])
def test_who_slept_through_a_purge_builds_on_what_postgres_has(*, lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        nats, inner, runs = MemoryNats(), MemoryThreadStore(), itertools.count()

        def new_run(thread_id: str = "t") -> Run:
            return Run(run_id=f"run-{next(runs)}", thread_id=thread_id)

        async with process(nats, inner, flusher=False) as slept, process(nats, inner, flusher=False) as other:
            await slept.checkpoint_append("t", [0], new_run())
            await other.checkpoint_append("t", [1], new_run())
            async with process(nats, inner) as flusher:
                await flusher.checkpoint("elsewhere", [], new_run("elsewhere"))
                await flusher.force_flush_all()
                stream = nats.streams[LogConfig.stream]
                async with asyncio.timeout(600):
                    while stream.last_of(SUBJECTS.groups) != stream.messages[0].seq:  # noqa: ASYNC110
                        await asyncio.sleep(1)
            if lost:
                lose_next(slept, monkeypatch)
            wanted = [0, 1, 2]
            try:
                await slept.checkpoint_append("t", [2], new_run())
            except OutcomeUnknown:
                wanted.remove(2)
                assert lost
            assert await other.load_messages("t") == wanted
            await slept.checkpoint_append("t", [3], new_run())
            async with process(nats, inner) as flusher:
                await flusher.force_flush_all()
                assert await flusher.quarantined() == 0
            assert await inner.load_messages("t") == [*wanted, 3]

    run(main())
