"""Several processes on one log, also when one of them is killed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bufstore import Consistency
from bufstore.jetstream.messages import Outgoing
from conftest import Deployment
from helpers import eventually, fresh, run_of

_WRITER = Path(__file__).parent.parent / "writer_process.py"


class Process:
    """A writer process and its acknowledged appends."""

    def __init__(self, deployment: Deployment, name: str, threads: list[str]) -> None:
        log = deployment.log
        self._options = {
            "nats": deployment.servers.nats.url,
            "postgres": deployment.servers.postgres.dsn,
            "schema": deployment.name,
            "name": name,
            "threads": threads,
            "log": {"stream": log.stream, "bucket": log.bucket, "subject": log.subject, "max_bytes": log.max_bytes},
        }
        self.acknowledged: dict[str, list[tuple[str, int]]] = {t: [] for t in threads}
        self.count = 0
        self._reader: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, str(_WRITER), json.dumps(self._options), stdout=asyncio.subprocess.PIPE
        )
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if not line.endswith(b"\n"):
                return  # the line was cut off by the kill
            said = json.loads(line)
            if isinstance(said, list):
                self.acknowledged[said[0]].append((said[1], said[2]))
                self.count += 1

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(60):
            while self.count < count:
                assert self._process is not None
                assert self._process.returncode is None, "the writer died of itself"
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        assert self._process is not None
        assert self._reader is not None
        self._process.kill()
        await self._process.wait()
        await self._reader


async def test_two_processes_on_the_same_hundred_threads(deployment: Deployment) -> None:
    threads = [fresh() for _ in range(100)]
    first, second = Process(deployment, "first", threads), Process(deployment, "second", threads)
    await asyncio.gather(first.start(), second.start())
    try:
        await asyncio.gather(first.reach(1500), second.reach(1500))
        await first.kill()
        await second.reach(second.count + 1500)
    finally:
        await asyncio.gather(first.kill(), second.kill(), return_exceptions=True)
    async with deployment.store(flush_timeout_s=60) as store:
        await store.force_flush_all()
        for thread_id in threads:
            found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) or []
            assert len(found) == len(set(found)), "an entry took effect twice"
            acknowledged = sorted(
                ((seq, key) for p in (first, second) for key, seq in p.acknowledged[thread_id]), key=lambda a: a[0]
            )
            known = {key for _, key in acknowledged}
            assert [m for m in found if m in known] == [key for _, key in acknowledged], "lost or out of order"
            for name in ("first", "second"):
                mine = [m for m in found if m.startswith(name)]
                assert mine == [f"{name}-{n}" for n in range(len(mine))]
                # The append in flight at the kill may be stored without an acknowledgement.
                assert len(mine) - len([k for k in known if k.startswith(name)]) <= 1
        assert await store.quarantined() == 0

        async def well() -> bool:
            state: Any = (await store.statistics()).flusher
            return bool(state.trouble == "")

        await eventually(well)


@pytest.mark.long  # a lease
async def test_a_record_of_a_dead_flusher_that_the_server_forgot_to_remove_holds_no_partition(
    deployment: Deployment,
) -> None:
    """A killed nats-server may keep a record for ever that should have expired after a second."""
    threads = [fresh() for _ in range(60)]
    async with deployment.store(flusher=False) as writer:
        for thread_id in threads:
            await writer.checkpoint(thread_id, [1], run_of(thread_id))
        ghost = f"$KV.{deployment.log.bucket}.member.0123456789abcdef"
        await writer.buffer.session.shared._put(Outgoing(ghost, b""), 5.0)  # type: ignore[attr-defined]
        assert list(await writer.buffer.shared.members()) == ["0123456789abcdef"]
        async with deployment.store() as store:
            await store.force_flush_all(timeout_s=20)
            await eventually(lambda: _alone(store))


async def _alone(store: Any) -> bool:
    return len(await store.buffer.shared.members()) == 1
