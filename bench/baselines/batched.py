"""*batched*: group commit with the client library and nothing else.

What arrives while one atomic batch is stored goes out as the next batch. No order within a thread, no expectation, no
envelope; a batch that the server refuses fails.
"""

from __future__ import annotations

import asyncio
import json
import secrets

import nats
from nats.js.api import StreamConfig

from bench.contestant import Contestant, body

_BATCH_MAX = 1000


class Batched(Contestant):
    """Publishes with nats-py, one batch at a time."""

    async def open(self) -> None:
        self._client = await nats.connect(self.place.nats)
        self._js = self._client.jetstream()
        self._stream = f"batched-{self.place.name}"
        await self._js.add_stream(StreamConfig(name=self._stream, subjects=[f"{self._stream}.>"], allow_atomic=True))
        self._waiting: list[tuple[str, int, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._js.delete_stream(self._stream)
        await self._client.close()

    async def step(self, thread: str, number: int) -> None:
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((thread, number, stored))
        self._wake.set()
        await stored

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(0)  # callers that the last batch has woken add their next entries now
            group, self._waiting = self._waiting[:_BATCH_MAX], self._waiting[_BATCH_MAX:]
            if not self._waiting:
                self._wake.clear()
            if not group:
                continue
            try:
                await self._store(group)
            except Exception as e:
                for *_, stored in group:
                    stored.set_exception(e)
            else:
                for *_, stored in group:
                    stored.set_result(None)

    async def _store(self, group: list[tuple[str, int, asyncio.Future[None]]]) -> None:
        id_ = secrets.token_hex(8)
        for place, (thread, number, _) in enumerate(group[:-1], 1):
            headers = {"Nats-Batch-Id": id_, "Nats-Batch-Sequence": str(place)}
            await self._client.publish(f"{self._stream}.{thread}", body(number), headers=headers)
        headers = {"Nats-Batch-Id": id_, "Nats-Batch-Sequence": str(len(group)), "Nats-Batch-Commit": "1"}
        thread, number, _ = group[-1]
        last = f"{self._stream}.{thread}"
        answer = json.loads((await self._client.request(last, body(number), headers=headers, timeout=60)).data)
        if "error" in answer:
            raise RuntimeError(str(answer["error"]))
