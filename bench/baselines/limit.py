"""*limit*, for appends: the fastest loop for making messages durable in JetStream.

Batches (ADR-50) are framed as bytes and written at once: no envelope, no checksum, no expectation, no order within a
thread, no client library. For each number of callers the best shape is found first: one batch of all, two of half, or
single messages written at once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence

from bench.baselines.raw_nats import RawNats, bare_stream, checked
from bench.contestant import BODIES, PAYLOAD, Contestant, summary
from bench.processor import Meter

#: The server's limit for an atomic batch.
_BATCH_MAX = 1000
_TRIAL_S = 0.3
_BODIES = [body + b"\r\n" for body in BODIES]


class Limit(Contestant):
    """Raw frames on a socket."""

    async def open(self) -> None:
        self._nats = await RawNats.connect(self.place.nats)
        self._stream = f"limit-{self.place.name}"
        stream = bare_stream(self._stream, allow_atomic=True, num_replicas=self.place.replicas)
        await self._nats.ask(f"$JS.API.STREAM.CREATE.{self._stream}", stream)

    async def close(self) -> None:
        await self._nats.remove(f"STREAM.DELETE.{self._stream}")
        self._nats.close()

    async def load(self, callers: int, seconds: float, label: str) -> dict[str, float]:
        subjects = [f"{self._stream}.{label}-{who}" for who in range(callers)]
        shapes = [(parts, atomic) for parts, atomic in ((1, True), (2, True), (1, False)) if parts <= callers]
        trials = [await self._run(subjects, min(_TRIAL_S, seconds / 4), *shape) for shape in shapes]
        best = max(range(len(shapes)), key=lambda i: trials[i]["rate"])
        return await self._run(subjects, seconds, *shapes[best])

    async def _run(self, subjects: Sequence[str], seconds: float, parts: int, atomic: bool) -> dict[str, float]:
        """Publish to all subjects again and again, in `parts` concurrent loops."""
        meter = Meter(self.server_pids())
        size = min(-(-len(subjects) // parts), _BATCH_MAX)
        shares = [subjects[i : i + size] for i in range(0, len(subjects), size)]
        latencies: list[float] = []
        began = time.perf_counter()
        end = began + seconds

        async def loop(share: Sequence[str]) -> None:
            send = self._batch if atomic and len(share) > 1 else self._singles
            while (at := time.perf_counter()) < end:
                await send(share)
                latencies.extend([time.perf_counter() - at] * len(share))

        await asyncio.gather(*map(loop, shares))
        took = time.perf_counter() - began
        return summary(latencies, len(latencies), took) | meter.each(len(latencies))

    async def _batch(self, subjects: Sequence[str]) -> None:
        reply, answer = self._nats.expect()
        self._nats.write(batch(subjects, reply))
        checked(await answer)

    async def _singles(self, subjects: Sequence[str]) -> None:
        answers = []
        parts = []
        for number, subject in enumerate(subjects):
            reply, answer = self._nats.expect()
            answers.append(answer)
            parts += [f"PUB {subject} {reply} {PAYLOAD}\r\n".encode(), _BODIES[number % len(_BODIES)]]
        self._nats.write(b"".join(parts))
        for answer in answers:
            checked(await answer)


def batch(subjects: Sequence[str], reply: str) -> bytes:
    """Return an atomic batch with one message of `PAYLOAD` bytes for each subject."""
    start = f"NATS/1.0\r\nNats-Batch-Id: {secrets.token_hex(8)}\r\nNats-Batch-Sequence: "
    last = len(subjects)
    parts = []
    for number, subject in enumerate(subjects, 1):
        commit, to = ("\r\nNats-Batch-Commit: 1", f" {reply}") if number == last else ("", "")
        head = f"{start}{number}{commit}\r\n\r\n"
        parts.append(f"HPUB {subject}{to} {len(head)} {len(head) + PAYLOAD}\r\n{head}".encode())
        parts.append(_BODIES[number % len(_BODIES)])
    return b"".join(parts)
