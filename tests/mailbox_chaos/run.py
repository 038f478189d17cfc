"""Chaos for the mailbox: producers and workers under a seeded schedule of faults, and a verdict.

    python -m mailbox_chaos.run --on nats --dispatches 100000 --seed 1     (or: make mailbox-chaos)

The seed decides what is enqueued and which fault comes when; how the instances react depends on the machine. At the end
all faults are over and the queues must empty by themselves. Every accepted dispatch is acked exactly once, and none is
left or given up. No token is used after a later one. No thread with due work waits longer than `WAIT_S` while a worker
is idle. Some dispatches are cancelled, some threads interrupted, and some claims cancelled during the call: exactly the
dispatches reported as ended have ended, no dispatch from before an interrupt is claimed after it, and a cancelled claim
uses no attempt unless a fault was near.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bufstore import AlreadyExists, BufstoreError, LogFull
from bufstore.embedded import RedisServer, Servers
from bufstore.mailbox import Dispatch, Status, StepUnknown, Sweeper, Worker
from bufstore.mailbox.store import MailboxStore
from bufstore.notify import RedisNotifier
from cluster import Cluster
from mailbox_chaos.faults import FAULTS, Place
from mailboxes import Mailboxes

#: How long the queues may take to empty after all faults, beyond the time of the work itself. A signal that found its
#: thread busy comes again after 30 s at most.
SETTLE_S = 90.0
#: A run in which nothing has happened for so long is stuck.
_STUCK_S = SETTLE_S + 60
#: Instances that enqueue, callers of each, and the largest number of dispatches that wait for the workers.
_PRODUCERS, _CALLERS, _BACKLOG = 3, 24, 1500
_THREADS = 200
#: The share of dispatches that are cancelled, and of those after which the thread is interrupted.
_CANCELLED, _INTERRUPTED = 0.02, 0.004
#: One claim is cancelled per this many dispatches.
_IMPATIENT = 100
_LEASE_S, _SWEEP_S = 3.0, 1.0
#: The lease where no claim may be lost: still shorter than `SETTLE_S`, in which one that is lost is found.
_LONG_LEASE_S = 30.0
#: docs/MAILBOX.md promises 30 s and two sweep intervals; the rest is for elections and a busy machine.
WAIT_S = 30 + 2 * _SWEEP_S + 10


@dataclass
class Report:
    """What happened in a run, and the rules it broke."""

    accepted: int = 0
    acked: int = 0
    cancelled: int = 0
    superseded: int = 0
    #: How many threads were interrupted, and how many claims cancelled during the call.
    interrupts: int = 0
    impatient: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    settled_s: float = 0.0
    #: In times without faults, while a worker was idle.
    longest_wait_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the report for people."""
        faults = ", ".join(f"{name} {n}" for name, n in sorted(self.faults.items()))
        names = ("claimed", "reclaimed", "stale_claims", "resignalled", "conflicts", "superseded", "work_lost")
        counts = ", ".join(f"{name} {self.counts[name]}" for name in names)
        lines = [
            f"{self.accepted} dispatches accepted, {self.acked} acked, {self.cancelled} cancelled, {self.superseded} "
            f"superseded by {self.interrupts} interrupts, {self.impatient} claims cancelled, in {self.seconds:.0f} s",
            f"faults: {faults or 'none'}",
            f"counters: {counts}",
            f"empty {self.settled_s:.1f} s after the last fault and the last enqueue; "
            f"no thread waited longer than {self.longest_wait_s:.1f} s beside an idle worker",
            *(f"WRONG: {text}" for text in self.wrong[:20]),
        ]
        return "\n".join(lines)


class Sink:
    """The target of the work: refuses tokens lower than one it has seen, as docs/MAILBOX.md asks."""

    def __init__(self) -> None:
        self.highest: dict[str, int] = {}
        self.effects: dict[tuple[str, str], list[int]] = defaultdict(list)

    def write(self, claim: Dispatch) -> bool:
        """Write under the claim's token; False if a later token was seen."""
        if claim.token < self.highest.get(claim.thread_id, 0):
            return False
        self.highest[claim.thread_id] = claim.token
        self.effects[claim.thread_id, claim.dispatch_id].append(claim.token)
        return True


class Run:
    """One run on one deployment."""

    def __init__(
        self, boxes: Mailboxes, place: Place, seed: int, dispatches: int, workers: int, *, mortal: bool = True
    ) -> None:
        self._boxes = boxes
        self._place = place
        self._chance = random.Random(seed)
        self._dispatches = dispatches
        self._workers = workers
        #: True when workers die, their clocks are wrong, and handlers take longer than their leases.
        self._mortal = mortal
        self._threads = [f"thread {n}" for n in range(_THREADS)]
        self.sink = Sink()
        self.report = Report()
        self._accepted: set[tuple[str, str]] = set()
        #: How dispatches were reported to have ended other than by an ack, and how they may have ended.
        self._told: dict[tuple[str, str], Status] = {}
        self._may: dict[tuple[str, str], set[Status]] = defaultdict(set)
        #: By thread: each interrupt's epoch (None: unknown) and the dispatches enqueued before it.
        self._interrupts: dict[str, list[tuple[int | None, set[str]]]] = defaultdict(list)
        self._enqueued: dict[str, set[str]] = defaultdict(set)
        #: A number that changes when a fault begins and when it ends.
        self._calm = 0
        self._produced = asyncio.Event()
        self._at_work: set[Worker] = set()
        #: Seconds without faults in which a worker was idle; and that number when a thread's work last ended.
        self._idle_s = 0.0
        self._idle_at_end: dict[str, float] = {}

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[MailboxStore]:
        """Open an instance, retrying until the servers allow it."""
        while True:
            notifier = None
            with suppress(BufstoreError):
                if self._place.redis is not None:
                    notifier = await RedisNotifier.open(self._place.redis.url, prefix=self._boxes.name)
                # In normal life nothing runs out, though the machine may stand still for some seconds.
                store = self._boxes.store(
                    notifier,
                    lease_s=_LEASE_S if self._mortal else _LONG_LEASE_S,
                    timeout_s=3.0 if self._mortal else 30.0,
                    sweep_interval_s=_SWEEP_S,
                    # With a notifier a worker need not poll.
                    signal_fetch_expires_s=0.2 if notifier is None else 5.0,
                )
                await store.backend.open()
                break
            if notifier is not None:
                await notifier.aclose()
            await asyncio.sleep(0.2)
        try:
            yield store
        finally:
            self.report.counts.update(store.statistics().counts)
            with suppress(BufstoreError):
                await store.aclose()
            if notifier is not None:
                await notifier.aclose()

    async def __call__(self, faults: list[str], hold_s: tuple[float, float] = (0.5, 3.0)) -> Report:
        """Produce, work and inject faults; then wait until all is done, and judge."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(self._instance(n)) for n in range(self._workers)]
            watching = group.create_task(self._watch())
            breaking = group.create_task(self._break(faults, hold_s))
            producers = [group.create_task(self._produce(n)) for n in range(_PRODUCERS)]
            producers.append(group.create_task(self._claim_impatiently()))
            await asyncio.gather(*producers)
            self._produced.set()
            await breaking
            quiet = time.monotonic()
            idling = group.create_task(self._idling())
            async with self._opened() as store:
                await self._settle(store)
                self.report.settled_s = time.monotonic() - quiet
                for task in (idling, *workers):
                    task.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
                watching.cancel()
                self.report.seconds = time.monotonic() - began
                await self._judge(store)
        return self.report

    async def _watch(self) -> None:
        """End a run that is stuck, and print where everybody waits."""
        before, since = None, time.monotonic()
        while True:
            await asyncio.sleep(5)
            now = len(self._accepted), len(self.sink.effects), len(self._told)
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > _STUCK_S:
                for task in asyncio.all_tasks():
                    print(task.get_name(), *_frames(task), sep="\n    ", file=sys.stderr)
                raise AssertionError(f"nothing has happened for {_STUCK_S:.0f} s: {self.report.text()}")

    # The work.

    async def _produce(self, number: int) -> None:
        chance = random.Random(self._chance.random())
        async with self._opened() as store:
            numbers = iter(range(number, self._dispatches, _PRODUCERS))
            await asyncio.gather(*(self._enqueue(store, numbers, chance) for _ in range(_CALLERS)))

    async def _enqueue(self, store: MailboxStore, numbers: Iterator[int], chance: random.Random) -> None:
        for n in numbers:
            while len(self._accepted) > len(self.sink.effects) + len(self._told) + _BACKLOG:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            thread_id, dispatch_id = chance.choice(self._threads), f"d{n}"
            delay_s = chance.choice((0, 0, 0, 0, 0.5, 2.0))
            while True:
                due = store.backend.now_ms() + round(1000 * delay_s) if delay_s else None
                try:
                    await store.enqueue(
                        thread_id,
                        b"x" * chance.choice((10, 100, 500)),
                        dispatch_id=dispatch_id,
                        dedupe_key=dispatch_id if n % 3 else None,
                        priority=chance.choice((128, 128, 128, 5)),
                        available_at_ms=due,
                        max_attempts=1000,
                    )
                    break
                except AlreadyExists:
                    break  # an earlier attempt was stored, and its answer lost
                except (StepUnknown, LogFull, BufstoreError):
                    await asyncio.sleep(0.1)
            self._accepted.add((thread_id, dispatch_id))
            self._enqueued[thread_id].add(dispatch_id)
            if chance.random() < _CANCELLED:
                await self._cancel(store, thread_id, dispatch_id)
            if chance.random() < _INTERRUPTED:
                await self._interrupt(store, thread_id)

    async def _cancel(self, store: MailboxStore, thread_id: str, dispatch_id: str) -> Dispatch | None:
        self._may[thread_id, dispatch_id].add(Status.CANCELLED)
        with suppress(BufstoreError):
            ended = await store.cancel(thread_id, dispatch_id)
            if ended is not None:
                self._told[thread_id, dispatch_id] = Status.CANCELLED
            return ended
        return None

    async def _interrupt(self, store: MailboxStore, thread_id: str) -> None:
        before = set(self._enqueued[thread_id])
        self.report.interrupts += 1
        try:
            done = await store.interrupt(thread_id)
        except StepUnknown:
            self._interrupts[thread_id].append((None, before))
        except BufstoreError:
            return  # nothing was done
        else:
            self._interrupts[thread_id].append((done.epoch, before))
            for d in done.superseded:
                self._told[thread_id, d.dispatch_id] = Status.SUPERSEDED

    async def _claim_impatiently(self) -> None:
        """Claim dispatches that workers may not claim yet, cancel the call at a random moment, remove the dispatch."""
        chance = random.Random(self._chance.random())
        async with self._opened() as store:
            for n in range(self._dispatches // _IMPATIENT):
                thread_id, dispatch_id, later = f"impatient {n}", f"i{n}", store.backend.now_ms() + 3600_000
                while True:
                    try:
                        await store.enqueue(
                            thread_id, dispatch_id=dispatch_id, available_at_ms=later, max_attempts=1000
                        )
                        break
                    except AlreadyExists:
                        break
                    except BufstoreError:
                        await asyncio.sleep(0.1)
                self._accepted.add((thread_id, dispatch_id))
                self._threads.append(thread_id)
                calm = self._calm
                claiming = asyncio.create_task(store.claim_dispatch(thread_id, dispatch_id, "impatient"))
                await asyncio.sleep(chance.choice((0, 0.001, 0.002, 0.005)))
                claiming.cancel()
                await asyncio.gather(claiming, return_exceptions=True)
                self.report.impatient += claiming.cancelled()
                claim = None
                if not claiming.cancelled() and claiming.exception() is None:
                    claim = claiming.result()
                await self._take_out(store, thread_id, dispatch_id, claim, calm)

    async def _take_out(
        self, store: MailboxStore, thread_id: str, dispatch_id: str, claim: Dispatch | None, calm: int
    ) -> None:
        while True:
            with suppress(BufstoreError):
                if claim is not None:
                    self.sink.write(claim)
                    await store.ack(claim)
                    return
                ended = await self._cancel(store, thread_id, dispatch_id)
                if ended is not None and ended.attempts and calm == self._calm and calm % 2 == 0:
                    self.report.wrong.append(f"{dispatch_id}: a claim that was cancelled burnt an attempt in the calm")
                found = ended or await store.load_dispatch(thread_id, dispatch_id)
                if found is not None and found.status.finished:
                    return
            # The claim could not be handed back: once its lease has expired, a worker may take the dispatch.
            claim = None
            await asyncio.sleep(0.1)

    async def _instance(self, number: int) -> None:
        """Run a worker and a sweeper, which sometimes die without closing and are replaced by new ones."""
        chance = random.Random(self._chance.random())
        while True:
            async with AsyncExitStack() as stack:
                store = await stack.enter_async_context(self._opened())
                if self._mortal:
                    self._skew(store, chance.choice((0, 0, 300, -300)))
                sweeper = Sweeper(store)
                worker = Worker(store, f"worker {number}", self._handle)
                await sweeper.__aenter__()
                await worker.__aenter__()
                self._at_work.add(worker)
                try:
                    await asyncio.wait_for(self._produced.wait(), chance.uniform(3, 20) if self._mortal else None)
                    await asyncio.Event().wait()
                except TimeoutError:
                    self.report.faults["worker died"] += 1
                finally:
                    # The dead instance can hand nothing back: others must find what it holds.
                    self._at_work.discard(worker)
                    await store.backend.aclose()
                    await worker.aclose(drain_s=0)
                    await sweeper.aclose()

    def _skew(self, store: MailboxStore, ms: int) -> None:
        """Shift the instance's clock, on top of the servers' stepped clock."""
        real, stepped = store.backend.now_ms, self._place.stepped_ms
        store.backend.now_ms = lambda: real() + ms + stepped[0]  # type: ignore[method-assign]

    async def _idling(self) -> None:
        """Count the time in which a worker has a free slot."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.05)
            now = time.monotonic()
            if any(not worker._room.locked() for worker in self._at_work):
                self._idle_s += now - last
            last = now

    async def _handle(self, claim: Dispatch) -> None:
        try:
            self._waited(claim)
            await self._do(claim)
        finally:
            self._idle_at_end[claim.thread_id] = self._idle_s

    def _waited(self, claim: Dispatch) -> None:
        assert claim.claimed_at_ms is not None
        due_s = (claim.claimed_at_ms - max(claim.available_at_ms, claim.created_at_ms)) / 1000
        waited_s = min(due_s, self._idle_s - self._idle_at_end.get(claim.thread_id, 0.0))
        self.report.longest_wait_s = max(self.report.longest_wait_s, waited_s)

    async def _do(self, claim: Dispatch) -> None:
        chance = random.random()
        if chance < 0.01:
            raise ValueError("a failure now and then")
        await asyncio.sleep(1.5 * _LEASE_S if self._mortal and chance > 0.999 else 0.02 * chance)
        self.sink.write(claim)

    async def _break(self, names: list[str], hold_s: tuple[float, float]) -> None:
        """Inject faults while dispatches are produced: every kind comes once before any comes again."""
        deck: list[str] = []
        while names and not (self._produced.is_set() and self.report.faults):
            deck = deck or self._chance.sample(names, len(names))
            name = deck.pop()
            self.report.faults[name] += 1
            self._calm += 1
            async with FAULTS[name](self._place, self._chance):
                await asyncio.sleep(self._chance.uniform(*hold_s))
            self._calm += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._produced.wait(), self._chance.uniform(1, 4))

    # The verdict.

    async def _settle(self, store: MailboxStore) -> None:
        """Wait until nothing is queued or claimed."""
        last, since = -1, time.monotonic()
        while time.monotonic() < since + SETTLE_S:
            with suppress(BufstoreError):
                counts = await store.count_by_status()
                left = counts[Status.QUEUED] + counts[Status.CLAIMED]
                if not left:
                    return
                if left != last:
                    last, since = left, time.monotonic()
            await asyncio.sleep(0.5)
        self.report.wrong.append(f"{last} dispatches are left, and nothing has moved for {SETTLE_S} s")

    async def _judge(self, store: MailboxStore) -> None:
        wrong, found = self.report.wrong, {}
        for thread_id in self._threads:
            for d in await store.list_dispatches(thread_id, limit=1 << 30):
                found[thread_id, d.dispatch_id] = d
        self.report.accepted = len(self._accepted)
        ended = Counter(d.status for d in found.values())
        self.report.acked, self.report.cancelled = ended[Status.ACKED], ended[Status.CANCELLED]
        self.report.superseded = ended[Status.SUPERSEDED]
        for key in sorted(self._accepted):
            d = found.get(key)
            if (text := self._not_as_told(key, d)) is not None:
                wrong.append(text)
                continue
            if d is None or d.status is not Status.ACKED:
                continue
            tokens = self.sink.effects.get(key, [])
            if d.ended_by not in tokens:
                wrong.append(f"{key} was acked by {d.ended_by}, which had no effect: {tokens}")
            elif tokens[-1] != d.ended_by:
                wrong.append(f"{key} had an effect after its ack by {d.ended_by}: {tokens}")
        if self.report.longest_wait_s > WAIT_S:
            wrong.append(f"a thread waited for {self.report.longest_wait_s:.1f} s, and a worker was idle")
        wrong += [f"{key} was never accepted" for key in found.keys() - self._accepted]

    def _not_as_told(self, key: tuple[str, str], d: Dispatch | None) -> str | None:
        """Return an error when a dispatch has not ended as its callers were told; None if it has."""
        if d is None:
            return f"{key} was accepted and is gone"
        told = self._told.get(key)
        if told is not None:
            return None if d.status is told else f"{key} was said to be {told.value}, and is {d.status.value}"
        interrupts = self._interrupts[key[0]]
        may = {Status.ACKED, *self._may[key]}
        if any(epoch is None or epoch > d.epoch for epoch, _ in interrupts):
            may.add(Status.SUPERSEDED)
        if d.status not in may:
            return f"{key} was accepted and is {d.status.value}"
        for epoch, before in interrupts:
            if epoch is not None and key[1] in before and d.status is Status.ACKED and (d.ended_by or 0) > epoch:
                return f"{key} was claimed as {d.ended_by} behind the interrupt {epoch} that came after it"
        return None


def _frames(task: asyncio.Task[Any]) -> Iterator[str]:
    """Yield where a task waits, the outermost call first."""
    waits: Any = task.get_coro()
    while (frame := getattr(waits, "cr_frame", None)) is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        waits = waits.cr_await
    yield repr(waits)


@asynccontextmanager
async def deployment(on: str) -> AsyncIterator[tuple[Mailboxes, Place]]:
    """Start servers for the run, and yield the mailbox on them."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bufstore-mailbox-")))
        servers = stack.enter_context(Servers()) if on != "replicas" else None
        cluster = await stack.enter_async_context(Cluster(folder)) if on == "replicas" else None
        redis = RedisServer(folder / "redis") if on == "redis" else None
        if redis is not None:
            stack.callback(redis.stop)
            await asyncio.to_thread(redis.start)
        boxes = Mailboxes("postgres" if on in ("postgres", "redis") else "nats", servers, cluster)
        boxes.max_bytes, boxes.pool_size = 256 << 20, 8
        yield boxes, Place(on, boxes, servers, cluster, redis)


async def main() -> int:
    parser = argparse.ArgumentParser(prog="mailbox_chaos.run", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--on", choices=("nats", "replicas", "postgres", "redis"), default="nats")
    parser.add_argument("--dispatches", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", default="all", help="names with commas between; all, or none")
    options = parser.parse_args()
    logging.getLogger("bufstore").setLevel(logging.CRITICAL)
    async with deployment(options.on) as (boxes, place):
        names = [name for name, fault in FAULTS.items() if options.on in fault.on]
        if options.faults != "all":
            names = [name for name in names if name in options.faults.split(",")]
        report = await Run(boxes, place, options.seed, options.dispatches, options.workers)(names)
    print(f"on {options.on}, seed {options.seed}: {report.text()}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
