"""The write path on a fake log, with a store behind it and a flush by hand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from bufstore.buffer.append.appender import Appender
from bufstore.buffer.chain import Watermark, plan
from bufstore.buffer.domain import Backing
from bufstore.buffer.entry import Malformed, StoredEntry, items_of
from bufstore.buffer.parts import Parts
from bufstore.buffer.ports.ledger import Cursor, Decision
from bufstore.buffer.ports.waiting import WaitingEntry
from bufstore.buffer.read.overlay import overlay
from bufstore.buffer.read.reads import Reads
from bufstore.buffer.target import Kind
from bufstore.buffer.windows import Windows
from bufstore.config import BufferConfig
from bufstore.errors import StoreUnavailable
from bufstore.memory.ledger import MemoryLedger
from bufstore.threads.coalesce import coalesce
from bufstore.threads.digests import MessageMemory, digests_of, ids_of
from bufstore.threads.domain import THREADS
from bufstore.threads.memory_store import MemoryThreadStore
from bufstore.threads.model import Run, ThreadChange, decode_message, encode_messages, encode_run
from bufstore.threads.payload import decode_payload
from bufstore.threads.runs import Runs
from bufstore.threads.state import ThreadState
from bufstore.threads.state_readers import ComparingReader
from bufstore.threads.write import Call, save_of
from bufstore.types import Receipt
from unit.fake_log import FakeLog, run
from unit.group_server import SUBJECTS, GroupServer

ThreadParts = Parts[ThreadChange, ThreadState, MessageMemory]


class World:
    """A log, a store behind it, and a flush by hand."""

    def __init__(self, server: GroupServer | None = None, **config: Any) -> None:
        self.log = server or GroupServer()
        self.store = MemoryThreadStore()
        self.ledger = MemoryLedger(self.store)
        self.reached = Reached(self)
        self.store_is_up = True
        self.config = BufferConfig(**config)
        self.log.stream.windows = Windows.of(self.config.log)
        self.instances: list[Instance] = []

    def parts(self, shared: Any = None, ledger: Any = None) -> ThreadParts:
        """The parts of one process."""
        return Parts(
            domain=THREADS,
            log=self.log.open(self.config),
            shared=shared,
            ledger=ledger or self.reached,
            subjects=SUBJECTS,
            config=self.config,
        )

    def tail(self, thread_id: str, after: int = 0) -> list[StoredEntry | Malformed]:
        subject = SUBJECTS.of(thread_id)
        return items_of([m for m in self.log.messages if m.subject == subject and m.seq > after], thread_id)

    async def flush(self, thread_id: str = "t", poison: frozenset[int] = frozenset()) -> None:
        def decide(watermarks: Any) -> Decision:
            watermark = watermarks[thread_id]
            causes = dict.fromkeys(poison, "poison")
            todo = plan(watermark, [*waiting, *self.tail(thread_id)], complete=True, poison=causes)
            batch = [coalesce(thread_id, watermark.version, todo.apply)] if todo.apply else []
            left = {thread_id: todo.watermark.flushed_seq} if waiting else {}
            return Decision(batch, {thread_id: todo.watermark}, todo.park, left=left)

        waiting = await self.ledger.waiting.of_thread(thread_id)
        await self.ledger.flush([], [thread_id], decide)

    async def make_wait(self, thread_id: str = "t") -> None:
        """Move the thread's entries from the log into the ledger, where they wait."""
        watermark = await self.ledger.watermark(thread_id)
        tail = self.tail(thread_id, max(watermark.flushed_seq, watermark.waits_to))
        waiting = [WaitingEntry(item, SUBJECTS.partition(thread_id), "its row is held") for item in tail]
        await self.ledger.flush([], [], lambda _: Decision(waiting=waiting))

    async def make_wait_and_purge(self, thread_id: str = "t") -> None:
        """Do so, and purge as after a failover window; the log's newest entry is another thread's."""
        await self.make_wait(thread_id)
        self.log.intrude(SUBJECTS.of("elsewhere"))
        self.log.expire_below(self.log.last_seq)

    async def flush_and_purge(self, thread_id: str = "t") -> None:
        """Flush, and purge as after a failover window; the log's newest entry is another thread's."""
        self.log.intrude(SUBJECTS.of("elsewhere"))
        await self.flush(thread_id)
        self.log.expire_below(self.log.last_seq)

    async def shown(self, thread_id: str = "t") -> ThreadState:
        """The thread as a read joins it from store and log."""
        watermark = await self.ledger.watermark(thread_id)
        thread = await self.store.load_thread(thread_id)
        state = ThreadState(
            watermark=watermark, thread=thread, messages=self.store._messages.get(thread_id, []), latest_run=None
        )
        items = [*await self.ledger.waiting.of_thread(thread_id), *self.tail(thread_id, watermark.flushed_seq)]
        return overlay(THREADS, state, thread_id, items)

    async def messages(self, thread_id: str = "t") -> list[Any]:
        return [decode_message(m) for m in (await self.shown(thread_id)).messages]

    def runs(self, thread_id: str = "t") -> Counter[str]:
        """How often each run was saved by entries in the log; each call of these tests has a run of its own."""
        entries = [i for i in self.tail(thread_id) if isinstance(i, StoredEntry)]
        return Counter(decode_payload(i.entry.payload).save.run_id for i in entries)


class Reached:
    """The ledger as processes reach it: away while Postgres is down."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world.ledger, name)

    async def watermark(self, thread_id: str) -> Watermark:
        await asyncio.sleep(0)
        if not self._world.store_is_up:
            raise StoreUnavailable("Postgres is down")
        return await self._world.ledger.watermark(thread_id)

    async def watermarks(self, thread_ids: Sequence[str]) -> dict[str, tuple[Watermark, int]]:
        await asyncio.sleep(0)
        if not self._world.store_is_up:
            raise StoreUnavailable("Postgres is down")
        return await self._world.ledger.watermarks(thread_ids)

    async def cursors(self) -> dict[int, Cursor]:
        """The cursors; a flush by hand moves none, so they are then at what is settled."""
        if found := await self._world.ledger.cursors():
            return found
        bucket = self._world.log.bucket
        floors = {p: found.body for p in range(SUBJECTS.partitions) if (found := bucket.get("floor", p)) is not None}
        return {p: Cursor(p, 1, floor.settled, 0) for p, floor in floors.items()}


class Instance:
    """A process: an appender and what it needs of the domain."""

    def __init__(self, world: World) -> None:
        self.world = world
        parts = world.parts()
        self.log = parts.log
        reader = ComparingReader(world.store, world.reached)  # type: ignore[arg-type]
        backing = Backing(Kind("test", "test"), reader)
        self.reads = Reads(parts, backing, None, own_seq=lambda _: 0)  # type: ignore[arg-type]
        self.appender = Appender(parts, self.reads)
        held = SimpleNamespace(reads=self.reads, shared=None)
        lanes = SimpleNamespace(of=lambda _: held, config=world.config, same_postgres=self.reads.same_postgres)
        self.runs = Runs(world.store, lanes)  # type: ignore[arg-type]
        self.appender.start()
        self._runs = 0
        world.instances.append(self)

    async def checkpoint(
        self, messages: Sequence[Any], thread_id: str = "t", *, key: str | None = None, run_id: str | None = None,
        mark: bytes | None = None,
    ) -> Receipt:  # fmt: skip
        call, content = self._call(messages, thread_id, run_id)
        content = content if key else b""
        return await self.appender.append(thread_id, call.whole_list, key=key, content=content, mark=mark)

    async def append(
        self, messages: Sequence[Any], thread_id: str = "t", *, key: str | None = None, run_id: str | None = None,
        expected: int | None = None, mark: bytes | None = None,
    ) -> Receipt:  # fmt: skip
        call, content = self._call(messages, thread_id, run_id)
        content = content if key else b""
        call = msgspec.structs.replace(call, expected_version=expected)
        return await self.appender.append(thread_id, call.appending, key=key, content=content, mark=mark)

    async def series(
        self, steps: Sequence[tuple[Sequence[Any], str, bytes | None]], thread_id: str = "t"
    ) -> tuple[list[Receipt], Exception | None]:
        """Append messages, with these run ids and marks, in order."""
        wanted = []
        for messages, run_id, mark in steps:
            call, _ = self._call(messages, thread_id, run_id)
            wanted.append((call.appending, mark))
        return await self.appender.append_series(thread_id, wanted)

    def _call(self, messages: Sequence[Any], thread_id: str, run_id: str | None) -> tuple[Call, bytes]:
        self._runs += 1
        run_ = Run(run_id=run_id or f"run {self._runs} of {self.world.instances.index(self)}", thread_id=thread_id)
        encoded = encode_messages(messages)
        call = Call(thread_id, encoded, digests_of(encoded), ids_of(messages), encode_run(run_), save_of(run_))
        return call, b"|".join(encoded)

    async def aclose(self) -> None:
        await self.appender.aclose()
        await self.reads.aclose()
        await self.log.aclose()


def test(main: Any, **config: Any) -> None:
    """Run `main(world, instance)`, and close the instances that it leaves open."""

    async def whole() -> None:
        world = World(**config)
        try:
            await main(world, Instance(world))
        finally:
            for instance in world.instances:
                await instance.aclose()

    run(whole())


test.__test__ = False  # type: ignore[attr-defined]


def faults(log: FakeLog, *wanted: str) -> None:
    """Let the next writes have these faults."""
    left = list(wanted)
    log.fault = lambda kind: left.pop(0) if left and kind != "read" else ""
