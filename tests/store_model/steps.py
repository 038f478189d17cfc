"""What happens to the store in a model test: calls, reads, faults; each step with its own checks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from bufstore.buffer.ports import Outgoing
from bufstore.errors import (
    BufstoreError,
    FlushTimeout,
    LogUnavailable,
    ReadNotFresh,
    StoreUnavailable,
    ThreadQuarantined,
    Unavailable,
)
from bufstore.threads.lineage import Children
from bufstore.threads.model import (
    Run,
    RunStatus,
    ThreadMetadata,
    decode_message,
    decode_run,
)
from bufstore.threads.queries import RunQuery, ThreadQuery
from bufstore.types import Consistency, Receipt
from store_model.calls import Call, Witness
from store_model.faults import LOG_FAULTS, STORE_FAULTS
from store_model.story import BAD_RUN, Event, Point, Seen
from store_model.world import CONFIG, SUBJECTS, THREADS, Instance, Violation, World

_UNREADABLE = (ReadNotFresh, FlushTimeout, StoreUnavailable, LogUnavailable, Unavailable)


class Steps:
    """A world, and everything that can be done to it; all chances of a step come from the `chance` it is given."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.witness = Witness(self.world)
        self._number = 0
        self._receipts: dict[str, Receipt] = {}

    def step(self, name: str, chance: random.Random) -> None:
        """Do the step of this name, check everything."""
        self.world.counts[f"step {name}"] += 1
        self.world.audit = self.witness.audit
        self.world.run(getattr(self, name)(chance))

    # --- calls ------------------------------------------------------------------------------------------------

    async def write(self, chance: random.Random) -> None:
        """One call, or several at once, mostly on one thread."""
        thread_id = chance.choice(THREADS)
        count = chance.choice((1, 1, 1, 2, 3))
        calls = [
            self._call(chance, thread_id if chance.random() < 0.8 else chance.choice(THREADS)) for _ in range(count)
        ]
        await asyncio.gather(*(self._make(chance, call) for call in calls))

    async def burst(self, chance: random.Random) -> None:
        """Enough appends for a batch."""
        threads = [chance.choice(THREADS) for _ in range(12)]
        await asyncio.gather(*(self._make(chance, self._checkpoint_append(chance, t)) for t in threads))

    async def retry(self, chance: random.Random) -> None:
        """What is not known is made again, with its key."""
        unknown = [c for c in self.witness.calls if c.outcome == "unknown" and c.key is not None and not c.entries]
        if unknown:
            await self._make(chance, chance.choice(unknown[-3:]))

    async def _make(self, chance: random.Random, call: Call) -> None:
        await asyncio.sleep(chance.choice((0, 0, 0.01)))
        await self.witness.make(self._instance(chance), call)
        if call.receipt is not None:
            known = self._receipts.get(call.thread_id)
            if known is None or known.thread_seq < call.receipt.thread_seq:
                self._receipts[call.thread_id] = call.receipt

    def _instance(self, chance: random.Random) -> Instance:
        up = [i for i in self.world.instances if i.store is not None]
        return chance.choice(up or self.world.instances)

    def _call(self, chance: random.Random, thread_id: str) -> Call:
        kinds = [self._checkpoint] * 5 + [self._checkpoint_append] * 5 + [self._edit] * 6 + [self._lineage] * 2
        return chance.choice(kinds)(chance, thread_id)

    def _messages(self, chance: random.Random, count: int) -> list[Any]:
        messages: list[Any] = []
        for _ in range(count):
            self._number += 1
            size = chance.choice((1, 1, 1, 1, 5000))  # the latter takes several messages of the log
            messages.append({"id": f"m{self._number}", "text": "x" * size})
        return messages

    def _run(self, chance: random.Random, thread_id: str) -> Run:
        self._number += 1
        number = chance.choice(("1", "2", "3"))
        return Run(
            run_id=f"run-{number}-of-{thread_id}",
            thread_id=thread_id,
            status=chance.choice(list(RunStatus)),
            steps=self._number,
        )

    def _known(self, thread_id: str) -> list[Any]:
        """The messages of the thread, as far as the archive has been read."""
        story = self.world.archive.story(thread_id)
        return [decode_message(m) for m in story.shown(0, story.end).seen.messages]

    def _checkpoint(self, chance: random.Random, thread_id: str) -> Call:
        known = self._known(thread_id)
        keep = chance.choice((len(known), len(known), max(0, len(known) - 1), 0))
        messages = known[:keep] + self._messages(chance, chance.choice((0, 1, 2)))
        return self._saving("checkpoint", chance, thread_id, messages, {})

    def _checkpoint_append(self, chance: random.Random, thread_id: str) -> Call:
        options: dict[str, Any] = {}
        if chance.random() < 0.4:
            options["expected_version"] = len(self._known(thread_id)) + chance.choice((0, 0, 0, 1))
        messages = self._messages(chance, chance.choice((0, 1, 2)))
        if chance.random() < 0.1:
            messages += self._known(thread_id)[-1:]
        return self._saving("checkpoint_append", chance, thread_id, messages, options)

    def _saving(
        self, kind: str, chance: random.Random, thread_id: str, messages: list[Any], options: dict[str, Any]
    ) -> Call:
        run = self._run(chance, thread_id)
        key = f"key {self._number}" if chance.random() < 0.3 else None

        async def do(store: Any, key: str | None) -> Receipt:
            receipt: Receipt = await getattr(store, kind)(thread_id, messages, run, idempotency_key=key, **options)
            return receipt

        return Call(kind, thread_id, do, key)

    def _edit(self, chance: random.Random, thread_id: str) -> Call:
        kind = chance.choice(
            ("create_run", "save_thread", "update_metadata", "save_thread_state", "append_messages", "delete_messages")
        )
        self._number += 1
        arguments: list[Any] = [thread_id]
        match kind:
            case "create_run":
                arguments = [
                    Run(run_id=f"run-{self._number % 7}-of-{thread_id}", thread_id=thread_id, steps=self._number)
                ]
            case "save_thread" | "update_metadata":
                arguments.append(ThreadMetadata(title=str(self._number), resource_id=chance.choice((None, "a"))))
            case "save_thread_state":
                arguments.append({"number": self._number})
            case "append_messages":
                arguments.append(self._messages(chance, chance.choice((0, 1, 2))))
            case "delete_messages":
                ids = [m["id"] for m in self._known(thread_id)]
                arguments.append(chance.choice((None, ids[-1:], ids[:1], ["nobody"])))

        async def do(store: Any, key: str | None) -> Receipt:
            receipt: Receipt = await getattr(store, kind)(*arguments)
            return receipt

        return Call(kind, thread_id, do)

    def _lineage(self, chance: random.Random, thread_id: str) -> Call:
        if chance.random() < 0.6:
            parent = chance.choice((None, *(t for t in THREADS if t != thread_id)))

            async def set_parent(store: Any, key: str | None) -> Receipt:
                receipt: Receipt = await store.set_parent(thread_id, parent)
                return receipt

            return Call("set_parent", thread_id, set_parent, parent_thread_id=parent)
        children = chance.choice(list(Children))

        async def delete(store: Any, key: str | None) -> Receipt:
            receipt: Receipt = await store.delete_thread(thread_id, children=children)
            return receipt

        return Call("delete_thread", thread_id, delete, children=children)

    # --- reads ------------------------------------------------------------------------------------------------

    async def read(self, chance: random.Random) -> None:
        """A checkpoint at any level, maybe while something is written."""
        thread_id = chance.choice(THREADS)
        level = chance.choice(list(Consistency))
        receipt = self._receipts.get(thread_id) if chance.random() < 0.5 else None
        reading = self._read(self._instance(chance), thread_id, level, receipt)
        if chance.random() < 0.3:
            found, _ = await asyncio.gather(reading, self._make(chance, self._call(chance, thread_id)))
        else:
            found = await reading
        self.witness.audit()
        if found is not None:
            self._judge(thread_id, level, *found)

    async def _read(
        self, instance: Instance, thread_id: str, level: Consistency, receipt: Receipt | None
    ) -> tuple[Any, tuple[int, int], tuple[int, int], bool] | None:
        world = self.world
        store = instance.store
        if store is None:
            return None
        story = world.archive.story(thread_id)
        began, flushed, log_end = world.loop.time(), world.flushed(thread_id), world.nats.stream.end
        if level is Consistency.EVENTUAL:
            log_end = receipt.thread_seq if receipt is not None else 0
        task = instance.call(store.load_checkpoint(thread_id, consistency=level, at_least=receipt))
        shown: Any
        try:
            shown = await task
        except ThreadQuarantined as e:
            shown = e
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return None
        except _UNREADABLE as e:
            if not story.tainted:
                world.excuse(e, since=began)
            world.counts[f"read {level.value} unreadable"] += 1
            return None
        if world.loop.time() - began > CONFIG.read_timeout_s + 1:
            raise Violation(f"a read took {world.loop.time() - began:.1f} s")
        world.counts[f"read {level.value}"] += 1
        alone = store._reads.store_down is not None or world.weather.rough_until >= began
        return shown, (flushed, world.flushed(thread_id)), (log_end, world.nats.stream.end), alone

    def _judge(
        self,
        thread_id: str,
        level: Consistency,
        shown: Any,
        flushed: tuple[int, int],
        end: tuple[int, int],
        alone: bool,
    ) -> None:
        """Whether the story has such a chapter, between the positions at the read's beginning and at its end."""
        story = self.world.archive.story(thread_id)
        lowest, highest = min(flushed), max(flushed)  # a failover may have been between
        if level is Consistency.READ_YOUR_WRITES:
            watermarks = story.between(lowest, highest) if story.tainted else [0]
            points = [story.shown(w, e) for w in watermarks for e in story.between(*end)]
            if alone and story.tainted:
                points += [point for e in story.between(*end) for point in story.alone(e)]
        else:
            first = max(end[0], lowest) if level is Consistency.STRONG else max(lowest, min(end[0], highest))
            points = [story.at(seq) for seq in story.between(first, max(first, highest))]
        if any(self._is(shown, point, level, alone) for point in points):
            return
        raise Violation(
            f"{thread_id} read as {level.value} (flushed {flushed}, log {end}): {shown}; expected one of {points}"
        )

    def _is(self, shown: Any, point: Point, level: Consistency, alone: bool) -> bool:
        if isinstance(shown, ThreadQuarantined):
            return point.broken and level is not Consistency.EVENTUAL
        if point.broken and level is not Consistency.EVENTUAL:
            return False
        seen = point.seen
        if shown is None:
            return seen.thread is None
        if seen.thread is None:
            return False
        run = decode_run(seen.latest_run) if seen.latest_run is not None else None
        same = shown.messages == [decode_message(m) for m in seen.messages] and shown.latest_run == run
        state = decode_message(seen.state) if seen.state is not None else None
        return same and (alone or (shown.thread == seen.thread and shown.state == state))

    async def read_list(self, chance: random.Random) -> None:
        """Lists and runs, by a flush barrier."""
        instance, thread_id = self._instance(chance), chance.choice(THREADS)
        if instance.store is None:
            return
        kind = chance.choice(("messages", "runs", "threads", "run"))
        store, world, began, end = instance.store, self.world, self.world.loop.time(), self.world.nats.stream.end
        run_id = f"run-1-of-{thread_id}"
        work: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "messages": lambda: store.query_messages(thread_id, limit=200),
            "runs": lambda: store.query_runs(RunQuery(thread_id=thread_id), limit=200),
            "threads": lambda: store.query_threads(ThreadQuery(), limit=200),
            "run": lambda: store.load_run(run_id, quarantined="known"),
        }
        task = instance.call(work[kind]())
        try:
            answer = await task
        except _UNREADABLE as e:
            if not any(s.tainted for s in world.archive.stories.values()):
                world.excuse(e, since=began)
            return
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return
        self.witness.audit()
        if world.weather.rough_until >= began and kind == "run":
            return
        world.counts[f"list {kind}"] += 1
        threads = THREADS if kind == "threads" else [thread_id]
        for t in threads:
            story = world.archive.story(t)
            first = max(end, world.flushed(t)) if kind != "run" else end
            points = [story.at(s) for s in story.between(first, max(first, world.nats.stream.end))]
            if kind == "run":
                points = [
                    story.shown(f, s) for s in story.between(end, world.nats.stream.end) for f in (0, world.flushed(t))
                ]
            if not any(_listed(kind, t, answer, point.seen, run_id) for point in points):
                raise Violation(f"list of {kind} of {t}: {answer}; expected one of {points}")

    async def flush(self, chance: random.Random) -> None:
        """force_flush, of a thread or of all."""
        instance, world = self._instance(chance), self.world
        if instance.store is None:
            return
        thread_id = chance.choice((None, *THREADS))
        began = world.loop.time()
        ends = {t: world.nats.stream.last_of(SUBJECTS.of(t)) for t in THREADS}
        store = instance.store
        task = instance.call(store.force_flush_all() if thread_id is None else store.force_flush(thread_id))
        try:
            await task
        except (FlushTimeout, Unavailable) as e:
            world.excuse(e, since=began)
            return
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return
        for t in THREADS if thread_id is None else [thread_id]:
            if world.flushed(t) < ends[t] and world.weather.rough_until < began:
                raise Violation(f"{t} is flushed to {world.flushed(t)}, asked for was {ends[t]}")

    async def wait(self, chance: random.Random) -> None:
        """Time passes."""
        await asyncio.sleep(chance.choice((0.1, 0.3, 1, 3, 10, 40)))

    # --- faults -----------------------------------------------------------------------------------------------

    def _fault(self, what: str, rough_s: float = 15.0) -> None:
        self.world.weather.seen[what] += 1
        self.world.weather.rough(rough_s)

    async def crash(self, chance: random.Random) -> None:
        """A process is gone, maybe in the middle of calls, and mostly comes back."""
        instance = chance.choice(self.world.instances)
        self._fault("crash")
        calls = [self._call(chance, chance.choice(THREADS)) for _ in range(chance.choice((0, 1, 2)))]

        async def gone() -> None:
            await asyncio.sleep(chance.choice((0, 0, 0.01, 0.1)))
            await instance.crash()

        await asyncio.gather(gone(), *(self.witness.make(instance, call) for call in calls))
        if chance.random() < 0.8:
            await instance.start()

    async def restart(self, chance: random.Random) -> None:
        """A process is closed and opened again, or only opened."""
        instance = chance.choice(self.world.instances)
        self._fault("restart")
        await instance.stop()
        await instance.start()

    async def log_faults(self, chance: random.Random) -> None:
        """The next writes to the log fail."""
        self.world.weather.log.extend(chance.choice((*LOG_FAULTS, "")) for _ in range(chance.choice((1, 2, 4))))
        self._fault("log faults")
        await self.write(chance)

    async def store_faults(self, chance: random.Random) -> None:
        """The next calls of Postgres fail, before or after they took effect."""
        self.world.weather.store.extend(chance.choice((*STORE_FAULTS, "")) for _ in range(chance.choice((1, 2, 4))))
        self._fault("store faults")
        await self.write(chance)

    async def store_outage(self, chance: random.Random) -> None:
        """Postgres is away for a while."""
        seconds = chance.choice((0.5, 3, 20))
        self.world.weather.store_away_until = self.world.loop.time() + seconds
        self._fault("store outage", seconds + 15)

    async def log_outage(self, chance: random.Random) -> None:
        """NATS is away for a while: connections break, feeds end."""
        seconds = chance.choice((0.5, 2, 8))
        self.world.weather.log_away_until = self.world.loop.time() + seconds
        self._fault("log outage", seconds + 15)
        for feed in list(self.world.nats.stream.feeds.values()):
            feed.lose("the connection was lost")

    async def lose_feed(self, chance: random.Random) -> None:
        """A delivery is missing: the partition is taken again, and what was not acked is delivered again."""
        feeds = list(self.world.nats.stream.feeds.values())
        if feeds:
            chance.choice(feeds).lose("a delivery is missing")
            self._fault("feed lost")

    async def other_owner(self, chance: random.Random) -> None:
        """Somebody else raises terms, or is in the list of the members for a while."""
        partitions = [p for p in range(CONFIG.log.partitions) if chance.random() < 0.5]
        self._fault("other owner")
        if chance.random() < 0.5:
            await self.world.postgres.ledger.take(partitions, "somebody else")
        else:
            self.world.nats.bucket.put("member", "ghost", None, ttl_s=chance.choice((1, 4)))
            self.world.nats.bucket.tell("call", -1)

    async def lose_hot_state(self, chance: random.Random) -> None:
        """The bucket is gone, with all that is in it."""
        self.world.nats.bucket.clear()
        self._fault("hot state lost")

    async def fail_over(self, chance: random.Random) -> None:
        """Postgres falls back to an older copy of itself."""
        self._fault("failover", 30)
        self.world.fail_over(chance.choice((1, 2, 5, 20)))

    # --- poison -----------------------------------------------------------------------------------------------

    async def garbage(self, chance: random.Random) -> None:
        """A stranger publishes what is no entry, on a thread's subject or on nobody's."""
        subject = chance.choice([SUBJECTS.of(t) for t in THREADS[:2]] + [f"{CONFIG.log.subject}.0.not*a*token"])
        self.world.nats.stream.store([Outgoing(subject, b"garbage", chance.choice((None, "1.0.x")))])
        self._fault("garbage", 5)

    async def poison(self, chance: random.Random) -> None:
        """A checkpoint that the store refuses."""
        thread_id = chance.choice(THREADS[:2])
        self._number += 1
        run = Run(run_id=f"{BAD_RUN}-{self._number}", thread_id=thread_id)
        messages = self._messages(chance, 1)

        async def do(store: Any, key: str | None) -> Receipt:
            receipt: Receipt = await store.checkpoint_append(thread_id, messages, run, idempotency_key=key)
            return receipt

        self._fault("poison", 5)
        await self._make(chance, Call("checkpoint_append", thread_id, do))

    async def quarantine(self, chance: random.Random) -> None:
        """An operator replays a thread, after he mended the cause, or gives entries up."""
        world, thread_id = self.world, chance.choice(THREADS[:2])
        instance = self._instance(chance)
        if instance.store is None or world.loop.time() < world.weather.late_until:
            return
        store = instance.store
        try:
            await instance.call(store.force_flush(thread_id))
        except (FlushTimeout, Unavailable):
            return
        self.witness.audit()
        story = world.archive.story(thread_id)
        if world.flushed(thread_id) < story.end:
            return
        waiting = {seq for seq, e in world.postgres.ledger.parked.entries.items() if e.thread_id == thread_id}
        if chance.random() < 0.6:
            await self._replay(instance, thread_id, waiting)
        elif waiting:
            gone = [seq for seq in sorted(waiting) if chance.random() < 0.5]
            await self._discard(instance, thread_id, gone)

    async def _replay(self, instance: Instance, thread_id: str, waiting: set[int]) -> None:
        world, store = self.world, instance.store
        assert store is not None
        story = world.archive.story(thread_id)
        expected = [(seq, outcome) for seq, outcome in story.replayable() if seq in waiting]
        before = {seq for seq in waiting}
        world.postgres.mended = True
        try:
            outcomes = await instance.call(store.quarantine.replay_thread(thread_id))
        except BufstoreError:
            outcomes = None
        finally:
            world.postgres.mended = False
        left = {seq for seq, e in world.postgres.ledger.parked.entries.items() if e.thread_id == thread_id}
        if before != left:
            self._happened(thread_id, replayed=sorted(before - left))
        if outcomes is not None and [(o.seq, o.outcome) for o in outcomes] != expected:
            raise Violation(f"replayed {thread_id}: {outcomes}, expected {expected}")
        world.weather.seen["replayed"] += len(before - left)

    async def _discard(self, instance: Instance, thread_id: str, gone: list[int]) -> None:
        world, store = self.world, instance.store
        assert store is not None
        try:
            await instance.call(store.quarantine.discard(gone))
        except BufstoreError:
            pass
        left = [seq for seq in gone if seq not in world.postgres.ledger.parked.entries]
        if left:
            self._happened(thread_id, discarded=left)
        world.weather.seen["discarded"] += len(left)

    def _happened(self, thread_id: str, **what: list[int]) -> None:
        story = self.world.archive.story(thread_id)
        story.events.append(Event(self.world.flushed(thread_id), **what))
        story.tell_again()

    # --- the end ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Heal, and look whether all is there."""
        self.world.audit = self.witness.audit
        self.world.run(self.world.heal())
        self.world.run(self._check_all())
        self.world.run(self._stop_all())
        self.world.check_nothing_left()

    async def _check_all(self) -> None:
        world = self.world
        for instance in world.instances:
            assert instance.store is not None
            report = await instance.call(instance.store.verify())
            if not report.ok:
                raise Violation(f"verify: {report.findings}")
        for thread_id in THREADS:
            story = world.archive.story(thread_id)
            self._check_parked(thread_id)
            for instance in world.instances:
                for level in Consistency:
                    found = await self._read(instance, thread_id, level, None)
                    if found is None:
                        raise Violation(f"{thread_id} cannot be read as {level.value}")
                    self._judge(thread_id, level, *found[:-1], False)
            if world.in_store(thread_id) != story.at(story.end).seen:
                raise Violation(f"{thread_id} is not flushed as it was written")

    def _check_parked(self, thread_id: str) -> None:
        """Everything that was not applied is in quarantine, unless it was superseded or given up."""
        world = self.world
        entries = world.postgres.ledger.parked.entries
        story = world.archive.story(thread_id)
        waiting = {seq: e.base_id for seq, e in entries.items() if e.thread_id == thread_id}
        missing = story.parked.keys() - waiting.keys()
        now = story.at(story.end).applied_id
        # A refused entry that is deleted with its thread in the same flush is never asked for.
        missing = {seq for seq in missing if story.parked[seq] == now}
        if missing or waiting.keys() - story.parked.keys():
            raise Violation(f"{thread_id}: in quarantine are {waiting}, the story says {story.parked}")
        for seq in waiting:
            item = next(i for i in story.items if i.seq == seq)
            if entries[seq].item != item:
                raise Violation(f"{thread_id}: entry {seq} is not in quarantine as it was")

    async def _stop_all(self) -> None:
        for instance in self.world.instances:
            await instance.stop()


def _listed(kind: str, thread_id: str, answer: Any, seen: Seen, run_id: str) -> bool:
    if kind == "messages":
        return [r.message for r in answer.records] == [decode_message(m) for m in seen.messages]
    if kind == "runs":
        return {r.run_id: r for r in answer.runs} == {run: decode_run(record) for run, record in seen.runs}
    if kind == "run":
        record = dict(seen.runs).get(run_id)
        return answer == (decode_run(record) if record is not None else None)
    return {t.thread_id: t for t in answer.threads}.get(thread_id) == seen.thread
