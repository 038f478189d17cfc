"""The shared state in memory: a bucket as the server keeps it, and one instance's view of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bufstore.buffer.ports.log import Floor
from bufstore.buffer.ports.shared_state import RUN_TTL_S
from bufstore.errors import Closed
from bufstore.jetstream.messages import Conflict


@dataclass(frozen=True)
class _Value:
    seq: int
    body: Any
    until: float


class MemoryBucket:
    """Keys with a time to live, and their listeners."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, Any], _Value] = {}
        self._seq = 0
        #: The listeners: what each listens to, the instance that it belongs to, and its callback.
        self.listeners: list[tuple[str, MemorySharedState, Callable[..., None]]] = []

    def get(self, kind: str, key: Any = None) -> _Value | None:
        """Return the value, unless its time is over."""
        value = self._values.get((kind, key))
        return value if value is not None and value.until > asyncio.get_running_loop().time() else None

    def keys(self, kind: str) -> list[Any]:
        """Return all keys of a kind that have a value."""
        return [key for k, key in list(self._values) if k == kind and self.get(k, key) is not None]

    def put(self, kind: str, key: Any, body: Any, *, ttl_s: float = float("inf"), expected: int | None = None) -> int:
        """Replace a value; return its sequence. Raises Conflict."""
        before = self.get(kind, key)
        if expected is not None and expected != (before.seq if before is not None else 0):
            raise Conflict("wrong last sequence")
        self._seq += 1
        self._values[kind, key] = _Value(self._seq, body, asyncio.get_running_loop().time() + ttl_s)
        return self._seq

    def remove(self, kind: str, key: Any) -> None:
        """Forget a value."""
        self._values.pop((kind, key), None)

    def tell(self, kind: str, *what: Any) -> None:
        """Call every listener of this kind, each in its own turn of the event loop."""
        for wanted, _, callback in self.listeners:
            if wanted == kind:
                asyncio.get_running_loop().call_soon(callback, *what)

    def clear(self) -> None:
        """Lose everything that was kept."""
        self._values.clear()


class MemorySharedState:
    """See `bufstore.buffer.ports.shared_state.SharedState`."""

    def __init__(self, bucket: MemoryBucket) -> None:
        self._shared = bucket
        self._closed = False
        self.calls = 0
        self.unregistered = ""

    @property
    def refused(self) -> str:
        return ""

    async def _turn(self) -> MemoryBucket:
        """Return the bucket, a turn of the event loop later."""
        self.calls += 1
        await asyncio.sleep(0)
        if self._closed:
            raise Closed("the store is closed")
        return self._shared

    async def check(self) -> None:
        """Nothing to check: the bucket belongs to no other log."""

    async def setup(self) -> None:
        """Nothing to create."""

    async def claim_run(self, run_id: str, thread_id: str, timeout_s: float) -> str:
        bucket = await self._turn()
        found = bucket.get("run", run_id)
        if found is not None:
            return str(found.body)
        bucket.put("run", run_id, thread_id, ttl_s=RUN_TTL_S)
        return thread_id

    async def thread_of_run(self, run_id: str, timeout_s: float) -> str | None:
        found = (await self._turn()).get("run", run_id)
        return found.body if found is not None else None

    async def lineage(self, timeout_s: float) -> tuple[int, bytes]:
        found = (await self._turn()).get("lineage")
        return (found.seq, found.body) if found is not None else (0, b"")

    async def put_lineage(self, record: bytes, expected: int, timeout_s: float) -> int:
        return (await self._turn()).put("lineage", None, record, expected=expected)

    async def renew_member(self, member: str, ttl_s: int, trouble: str = "") -> None:
        (await self._turn()).put("member", member, trouble, ttl_s=ttl_s)

    async def troubles(self) -> dict[str, str]:
        bucket = await self._turn()
        found = {name: bucket.get("member", name) for name in bucket.keys("member")}
        return {name: value.body for name, value in found.items() if value is not None and value.body}

    async def leave(self, member: str) -> None:
        (await self._turn()).remove("member", member)
        await self.announce()

    async def announce(self) -> None:
        (await self._turn()).tell("call", -1)

    async def members(self) -> dict[str, int]:
        bucket = await self._turn()
        found = {name: bucket.get("member", name) for name in sorted(bucket.keys("member"))}
        return {name: value.seq for name, value in found.items() if value is not None}

    async def report(self, progress: Mapping[int, int]) -> None:
        bucket = await self._turn()
        for partition, seq in progress.items():
            bucket.put("flushed", partition, seq)
            bucket.tell("flushed", partition, seq)

    async def progress(self) -> dict[int, int]:
        bucket = await self._turn()
        return {p: value.body for p in bucket.keys("flushed") if (value := bucket.get("flushed", p)) is not None}

    async def put_floors(self, floors: Mapping[int, Floor]) -> None:
        bucket = await self._turn()
        for partition, floor in floors.items():
            bucket.put("floor", partition, floor)

    async def floors(self) -> dict[int, Floor]:
        bucket = await self._turn()
        return {p: value.body for p in bucket.keys("floor") if (value := bucket.get("floor", p)) is not None}

    async def on_progress(self, callback: Callable[[int, int], None]) -> None:
        await self._listen("flushed", callback)

    async def tell_parked(self, thread_id: str) -> None:
        (await self._turn()).tell("parked", thread_id)

    async def on_parked(self, callback: Callable[[str], None]) -> None:
        await self._listen("parked", callback)

    async def call_owner(self, partition: int) -> None:
        (await self._turn()).tell("call", partition)

    async def on_call(self, callback: Callable[[int], None]) -> None:
        await self._listen("call", callback)

    async def _listen(self, kind: str, callback: Callable[..., None]) -> None:
        (await self._turn()).listeners.append((kind, self, callback))

    def close(self) -> None:
        """End this instance; the bucket stays."""
        self._closed = True
        self._shared.listeners[:] = [one for one in self._shared.listeners if one[1] is not self]
