"""*limit_groups*: the same bytes as *limit*, many of them in one message.

The entries of all callers go in messages of up to 256 KiB to one subject, one at a time, each with the expectation that
nobody else has written since the last: no envelope, no index, no checksum, no client library. The least cost of a log
whose writers see all entries of others before they add theirs.
"""

from __future__ import annotations

import time

from bench.baselines.raw_nats import RawNats, bare_stream, checked
from bench.contestant import BODIES, PAYLOAD, Contestant, summary
from bench.processor import Meter

_MESSAGE_BYTES = 256 << 10
_ENTRIES = _MESSAGE_BYTES // PAYLOAD


class LimitGroups(Contestant):
    """Raw frames on a socket."""

    async def open(self) -> None:
        self._nats = await RawNats.connect(self.place.nats)
        self._stream = f"groups-{self.place.name}"
        self._subject = f"{self._stream}.all"
        self._last = 0
        stream = bare_stream(self._stream, num_replicas=self.place.replicas)
        await self._nats.ask(f"$JS.API.STREAM.CREATE.{self._stream}", stream)

    async def close(self) -> None:
        await self._nats.remove(f"STREAM.DELETE.{self._stream}")
        self._nats.close()

    async def load(self, callers: int, seconds: float, label: str) -> dict[str, float]:
        sizes = [min(_ENTRIES, callers - first) for first in range(0, callers, _ENTRIES)]
        bodies = [b"".join(BODIES[i % len(BODIES)] for i in range(size)) for size in sizes]
        await self._send(bodies[0])
        meter = Meter(self.server_pids())
        began = time.perf_counter()
        end = began + seconds
        latencies: list[float] = []
        # A caller has its next entry when its last one is stored, and waits while others' entries are stored.
        since = [began] * len(sizes)
        while time.perf_counter() < end:
            for number, (size, body) in enumerate(zip(sizes, bodies, strict=True)):
                await self._send(body)
                now = time.perf_counter()
                latencies.extend([now - since[number]] * size)
                since[number] = now
        took = time.perf_counter() - began
        return summary(latencies, len(latencies), took) | meter.each(len(latencies))

    async def _send(self, body: bytes) -> None:
        reply, answer = self._nats.expect()
        head = f"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: {self._last}\r\n\r\n".encode()
        sizes = f"{len(head)} {len(head) + len(body)}"
        self._nats.write(b"".join((f"HPUB {self._subject} {reply} {sizes}\r\n".encode(), head, body, b"\r\n")))
        self._last = int(checked(await answer)["seq"])
