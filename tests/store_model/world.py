"""Two instances of the whole store on one database in memory, with one lane or several, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

from bufstore.buffer.buffer import Buffer
from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import Backing
from bufstore.buffer.lanes import lane_configs, lane_of
from bufstore.buffer.subjects import Subjects
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import BufstoreError, MalformedEntry
from bufstore.memory.shared_state import MemoryBucket
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.threads.domain import THREADS as DOMAIN
from bufstore.threads.lanes import ThreadBuffer, ThreadLanes
from bufstore.threads.protocol import kind_of
from bufstore.threads.state_readers import ComparingReader
from bufstore.types import Consistency
from store_model.archiving import ArchivingStream
from store_model.faults import BuryingLedger, FaultyNats, LedgerView, Postgres, StoreView, Weather
from store_model.pausing import PausingLoop
from store_model.story import Archive, Event, Seen, seen_in

T = TypeVar("T")

CONFIG = BufferConfig(
    log=LogConfig(partitions=4, max_bytes=8 << 20, failover_window_s=20.0),
    append_timeout_s=4.0,
    read_timeout_s=4.0,
    flush_timeout_s=10.0,
    flush_interval_s=0.2,
    lease_s=4,
    retain_after_flush_s=30.0,
    cached_threads=3,
)
THREADS = [f"thread-{n}" for n in range(5)]
#: Once all faults have ended, everything must be flushed within this time.
SETTLED_WITHIN_S = 60.0
#: The most calls of a log and its hot state per second, on average over a step.
_CALLS_A_SECOND = 1500

_where: contextvars.ContextVar[int] = contextvars.ContextVar("instance", default=-1)


class Violation(AssertionError):
    """A guarantee does not hold."""


class Lane:
    """One log and its ledger."""

    def __init__(self, config: BufferConfig, nats: FaultyNats, ledger: BuryingLedger) -> None:
        self.config, self.ledger = config, ledger
        self.subjects = Subjects(config.log.subject, config.log.partitions)
        self._nats = nats
        self.cursors: dict[int, tuple[int, int]] = {}

    @property
    def stream(self) -> ArchivingStream:
        stream = self._nats.streams[self.config.log.stream]
        assert isinstance(stream, ArchivingStream)
        return stream

    @property
    def bucket(self) -> MemoryBucket:
        return self._nats.buckets[self.config.log.bucket]

    def check_cursors(self) -> None:
        """Check that no partition's cursor went back since the last check."""
        for partition, cursor in self.ledger._cursors.items():
            if (cursor.term, cursor.seq) < self.cursors.get(partition, (0, 0)):
                raise Violation(f"the cursor of partition {partition} went back to {cursor}")
            self.cursors[partition] = cursor.term, cursor.seq

    def behind(self) -> list[str]:
        """The partitions whose cursor is behind the log's end; a purge waits for all, even those without entries."""
        end, late = self.stream.end_of_entries, []
        for partition in range(self.config.log.partitions):
            cursor = self.ledger._cursors.get(partition)
            if end and (cursor is None or cursor.seq < end):
                late.append(f"partition {partition} of {self.config.log.stream}: {cursor} of {end}")
        return late


class Instance:
    """A process, which may be killed at any moment, and started again."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._number = number
        self._context = contextvars.copy_context()
        self._context.run(_where.set, number)
        self.store: BufferedThreadStore | None = None

    async def start(self) -> bool:
        """Open the store if it is not open. Returns whether it is open now."""
        if self.store is None:
            world, member = self._world, secrets.token_hex(8)
            self.store = await self.call(self._make(world, member))
        return self.store is not None

    async def _make(self, world: World, member: str) -> BufferedThreadStore | None:
        view = StoreView(world.postgres)
        lanes = ThreadLanes([self._buffer(lane, view, member) for lane in world.lanes])
        try:
            await lanes.open()
        except BufstoreError as e:
            world.excuse(e)
            return None
        return BufferedThreadStore(view, lanes, Consistency.READ_YOUR_WRITES)  # type: ignore[arg-type]

    def _buffer(self, lane: Lane, view: StoreView, member: str) -> ThreadBuffer:
        world = self._world
        ledger: Any = LedgerView(world.postgres, lane.ledger)
        backing = Backing(kind_of(view), ComparingReader(view, ledger), held=view._held)
        return Buffer(DOMAIN, world.nats.session(lane.config), ledger, backing, lane.config, member=member)

    def call(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in this process."""
        return self._world.loop.create_task(work, context=self._context)

    async def crash(self) -> None:
        """End the process without finishing anything, and lose its memory."""
        store, self.store = self.store, None
        if store is None:
            return
        for buffer in store.lanes.all:
            buffer.session.stream.close()  # type: ignore[attr-defined]
            buffer.shared.close()  # type: ignore[attr-defined]
            if buffer.flusher is not None:  # what is gone begins nothing anew
                buffer.flusher._stopping.set()
        while tasks := [t for t in self._world.tasks[self._number] if not t.done()]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def stop(self) -> None:
        """Close the store as an app does."""
        store, self.store = self.store, None
        if store is not None:
            await self.call(store.aclose())


class World:
    """The whole model. Use `run` for each step, and `close` at the end, whatever happened."""

    def __init__(self, seed: int, lanes: int = 1) -> None:
        self.chance = random.Random(seed)
        self.loop = PausingLoop(_where)
        self.tasks: dict[int, set[asyncio.Task[Any]]] = {}
        self.loop.set_task_factory(self._make_task)
        self._complaints: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self._complaints.append(context))
        self._chance_of_others = random.getstate()
        random.seed(seed)  # for the pauses between retries
        self._patches = [
            mock.patch("secrets.randbits", self.chance.getrandbits),
            mock.patch("secrets.token_hex", lambda n: f"{self.chance.getrandbits(8 * n):0{2 * n}x}"),
            mock.patch("bufstore.tasks.Task", lambda work, loop, **options: self._make_task(loop, work, **options)),
        ]
        for patch in self._patches:
            patch.start()
        self.weather = Weather(random.Random(seed + 1))
        self.archive = Archive(self._thread_of, self.weather.archive)
        # As many partitions in all as with one lane, so that threads have neighbours.
        log = replace(CONFIG.log, lanes=lanes, partitions=CONFIG.log.partitions // lanes)
        self.config = replace(CONFIG, log=log)
        configs = lane_configs(self.config)
        self.nats = FaultyNats(self.weather, [config.log for config in configs])
        self.postgres = Postgres(self.weather, lanes)
        self.lanes = [Lane(c, self.nats, ledger) for c, ledger in zip(configs, self.postgres.ledgers, strict=True)]
        for lane in self.lanes:
            lane.ledger.on_burial = self._on_burial
        self.instances = [Instance(self, n) for n in range(2)]
        #: When each copy of the database was made, the copy, and how many events each story had then.
        self.copies: deque[tuple[float, Any, Counter[str]]] = deque()
        self._rows: dict[str, Watermark] = {}
        self.counts: Counter[str] = Counter()
        #: The seconds that processes stood still, added up.
        self.stood_still = 0.0
        #: Reads new entries of the archive, after each step.
        self.audit: Callable[[], None] = lambda: None
        self.run(self.start())

    def lane(self, thread_id: str) -> Lane:
        """The thread's lane."""
        return self.lanes[lane_of(thread_id, self.config.log)]

    def _thread_of(self, subject: str) -> str:
        for lane in self.lanes[::-1]:
            with contextlib.suppress(MalformedEntry):
                thread_id = lane.subjects.thread_id(subject)
                if self.lane(thread_id) is not lane:
                    raise Violation(f"{thread_id} was written to {subject}")
                return thread_id
        raise MalformedEntry(f"{subject} is no thread's")

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        context = options.get("context")
        number = context.get(_where, -1) if context is not None else _where.get()
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
        tasks = self.tasks.setdefault(number, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do one step; then check what must hold at every moment."""
        began, calls = self.loop.time(), self._calls()
        result = self.loop.run_until_complete(work)
        passed = self.loop.time() - began
        if self._calls() - calls > _CALLS_A_SECOND * len(self.lanes) * (1 + passed):
            raise Violation(f"{self._calls() - calls} calls in {passed:.3f} s")
        self.audit()
        self._check_moment()
        self.take_copy()
        return result

    def _calls(self) -> int:
        buffers: list[Any] = [b for i in self.instances if i.store is not None for b in i.store.lanes.all]
        return sum(b.session.stream.calls + b.shared.calls for b in buffers)

    def check_nothing_left(self) -> None:
        """Check that everything that was started has ended."""
        left = [t for t in asyncio.all_tasks(self.loop) if not t.done()]
        if left:
            raise Violation(f"left behind: {left}")

    def close(self) -> None:
        """Cancel all tasks, and undo all patches."""
        try:
            if not self.loop.is_closed():
                for task in asyncio.all_tasks(self.loop):
                    task.cancel()
                self.loop.run_until_complete(asyncio.sleep(0))
                self.loop.close()
        finally:
            for patch in self._patches:
                patch.stop()
            random.setstate(self._chance_of_others)

    async def start(self) -> None:
        """Start the instances that are down."""
        for instance in self.instances:
            await instance.start()

    def excuse(self, error: BaseException, *, since: float | None = None) -> None:
        """Raise a Violation unless there is a reason for this error, which says that something is away."""
        if self.weather.rough_until < (self.loop.time() if since is None else since):
            raise Violation(f"all is well, and yet {type(error).__name__}: {error}") from error

    # --- what must hold at every moment

    def _check_moment(self) -> None:
        if self._complaints:
            raise Violation(f"an exception that nobody looked at: {self._complaints}")
        for lane in self.lanes:
            lane.check_cursors()
        rows = {thread_id: row for lane in self.lanes for thread_id, row in lane.ledger._rows.items()}
        for thread_id, watermark in rows.items():
            if watermark.flushed_seq < self._rows.get(thread_id, watermark).flushed_seq:
                raise Violation(f"the watermark of {thread_id} went back to {watermark.flushed_seq}")
            self._rows[thread_id] = watermark
        for thread_id in THREADS:
            self.check_flushed(thread_id)
            self._check_passed(thread_id)

    def check_flushed(self, thread_id: str) -> None:
        """Check that Postgres holds the thread as the story tells it at the thread's watermark."""
        watermark = self.lane(thread_id).ledger._rows.get(thread_id, Watermark())
        story = self.archive.story(thread_id)
        if watermark.flushed_seq > story.end:
            return  # the archive is read at the end of the step
        point, found = story.at(watermark.flushed_seq), self.in_store(thread_id)
        if found != point.seen:
            raise Violation(f"{thread_id} at {watermark.flushed_seq}: the store has {found}, the story {point.seen}")
        shown = (watermark.flushed_seq, watermark.applied_id, watermark.version, watermark.broken_since is not None)
        expected = (point.seq, point.applied_id, len(point.seen.messages), point.broken)
        if shown != expected:
            raise Violation(f"{thread_id}: the row is {shown}, the story says {expected}")

    def _check_passed(self, thread_id: str) -> None:
        """Check that the thread's entries behind the cursor are flushed, or wait as they were written."""
        lane, flushed = self.lane(thread_id), self.flushed(thread_id)
        ledger = lane.ledger
        waiting = {seq: entry.item for (t, seq), (entry, _) in ledger.waiting.entries.items() if t == thread_id}
        cursor = ledger._cursors.get(lane.subjects.partition(thread_id))
        story = self.archive.story(thread_id)
        if any(seq <= flushed for seq in waiting):
            raise Violation(f"{thread_id} is flushed up to {flushed}, and yet {sorted(waiting)} wait")
        passed = max(cursor.seq if cursor is not None else 0, *waiting, 0)
        if flushed or not any(e.buried for e in story.events):
            expected = {i.seq: i for i in story.items if flushed < i.seq <= passed}
            if waiting != expected:
                raise Violation(f"{thread_id}: {sorted(waiting)} wait, {sorted(expected)} are passed and not flushed")
        self.counts["moments at which entries waited"] += bool(waiting)

    def _on_burial(self, thread_id: str, seq: int) -> None:
        self.weather.seen["buried"] += 1
        self.audit()
        story = self.archive.story(thread_id)
        story.events.append(Event(seq, buried=True))
        story.tell_again()

    def in_store(self, thread_id: str) -> Seen:
        return seen_in(self.postgres.store, thread_id)

    def flushed(self, thread_id: str) -> int:
        return self.lane(thread_id).ledger._rows.get(thread_id, Watermark()).flushed_seq

    def end_of(self, thread_id: str) -> int:
        """The place of the thread's last entry that is still in the log; 0 if there is none."""
        return self.lane(thread_id).stream.end_of(thread_id)

    def log_end(self, thread_id: str) -> int:
        """An upper bound of the places in the thread's log."""
        return self.lane(thread_id).stream.last_place

    # --- Postgres and its copies

    def take_copy(self) -> None:
        """Copy the database; drop copies that are too old for a failover."""
        now = self.loop.time()
        if now < self.weather.store_away_until:
            return  # after an outage of any length it may come back without its last commits
        events = Counter({t: len(s.events) for t, s in self.archive.stories.items()})
        self.copies.append((now, self.postgres.copy(), events))
        while self.copies and self.copies[0][0] < now - 0.9 * CONFIG.log.failover_window_s:
            self.copies.popleft()

    def fail_over(self, back: int) -> None:
        """Replace Postgres' content by an older copy."""
        if not self.copies:
            return
        while back > 0 and len(self.copies) > 1:
            self.copies.pop()
            back -= 1
        _, copy, events = self.copies[-1]
        self.postgres.put_back(copy)
        for thread_id, story in self.archive.stories.items():
            if len(story.events) > events[thread_id]:
                del story.events[events[thread_id] :]
                story.tell_again()
        self._rows.clear()
        for lane in self.lanes:
            lane.cursors.clear()

    # --- the end

    async def heal(self) -> None:
        """End all faults; then everything must be flushed, and correct."""
        self.weather.calm()
        for lane in self.lanes:
            lane.ledger.locked.clear()
        await asyncio.sleep(max(0.0, self.weather.late_until - self.loop.time()) + 1)
        self.weather.rough(15)
        await self.start()
        await self._until(self._all_flushed, "everything is flushed")
        self.weather.rough_until = max(self.weather.rough_until, self.loop.time() + 5)

    async def _until(self, done: Callable[[], Awaitable[str]], what: str) -> None:
        deadline = self.loop.time() + SETTLED_WITHIN_S
        while missing := await done():
            if self.loop.time() > deadline:
                buffers = [b for i in self.instances if i.store is not None for b in i.store.lanes.all]
                states = [b.flusher.state for b in buffers if b.flusher is not None]
                raise Violation(f"not in time: {what}: {missing}; {states}")
            await asyncio.sleep(0.25)

    async def _all_flushed(self) -> str:
        late = [f"{t}: {self.flushed(t)} of {self.end_of(t)}" for t in THREADS if self.flushed(t) < self.end_of(t)]
        return ", ".join(late + [partition for lane in self.lanes for partition in lane.behind()])
