"""The reads of a model test, and what they may show."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from bufstore.errors import (
    FlushTimeout,
    LogUnavailable,
    ReadNotFresh,
    StoreUnavailable,
    ThreadQuarantined,
    Unavailable,
)
from bufstore.threads.model import decode_message, decode_run
from bufstore.threads.queries import RunQuery, ThreadQuery
from bufstore.types import Consistency, Receipt
from store_model.drafts import Drafts
from store_model.story import Point, Seen
from store_model.world import CONFIG, THREADS, Instance, Violation

_UNREADABLE = (ReadNotFresh, FlushTimeout, StoreUnavailable, LogUnavailable, Unavailable)


class Reads(Drafts):
    """Reads at all levels of consistency; each answer must be a chapter of the thread's story."""

    async def read(self, chance: random.Random) -> None:
        """Read a checkpoint at any level, maybe during a write."""
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
        began, flushed, log_end = world.loop.time(), world.flushed(thread_id), world.log_end(thread_id)
        reads = store.lanes.of(thread_id).reads
        down = reads.store.down
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
        alone = (down or reads.store.down) is not None or world.weather.store_failed_at >= began
        return shown, (flushed, world.flushed(thread_id)), (log_end, world.log_end(thread_id)), alone

    def _judge(
        self,
        thread_id: str,
        level: Consistency,
        shown: Any,
        flushed: tuple[int, int],
        end: tuple[int, int],
        alone: bool,
    ) -> None:
        """Check that the story has such a chapter between the read's beginning and its end."""
        story = self.world.archive.story(thread_id)
        lowest, highest = min(flushed), max(flushed)  # a failover may have happened meanwhile
        if level is Consistency.READ_YOUR_WRITES:
            watermarks = story.between(lowest, highest) if story.tainted else [lowest]
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
        """Read lists and runs, which wait for a flush."""
        instance, thread_id = self._instance(chance), chance.choice(THREADS)
        if instance.store is None:
            return
        kind = chance.choice(("messages", "runs", "threads", "run"))
        store, world, began = instance.store, self.world, self.world.loop.time()
        ends = {t: world.log_end(t) for t in THREADS}
        flushed = {t: world.flushed(t) for t in THREADS}
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
        world.counts[f"list {kind}"] += 1
        threads = THREADS if kind == "threads" else [thread_id]
        for t in threads:
            story, end = world.archive.story(t), ends[t]
            first = max(end, world.flushed(t)) if kind != "run" else end
            points = [story.at(s) for s in story.between(first, max(first, world.log_end(t)))]
            if kind == "run":
                points = [
                    story.shown(f, s)
                    for s in story.between(end, world.log_end(t))
                    for f in (flushed[t], world.flushed(t))
                ]
            if not any(_listed(kind, t, answer, point.seen, run_id) for point in points):
                raise Violation(f"list of {kind} of {t}: {answer}; expected one of {points}")

    async def flush(self, chance: random.Random) -> None:
        """Force a flush of one thread or of all."""
        instance, world = self._instance(chance), self.world
        if instance.store is None:
            return
        thread_id = chance.choice((None, *THREADS))
        began = world.loop.time()
        ends = {t: world.end_of(t) for t in THREADS}
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
            if world.flushed(t) < ends[t]:
                raise Violation(f"{t} is flushed to {world.flushed(t)}, asked for was {ends[t]}")


def _listed(kind: str, thread_id: str, answer: Any, seen: Seen, run_id: str) -> bool:
    if kind == "messages":
        return [r.message for r in answer.records] == [decode_message(m) for m in seen.messages]
    if kind == "runs":
        return {r.run_id: r for r in answer.runs} == {run: decode_run(record) for run, record in seen.runs}
    if kind == "run":
        record = dict(seen.runs).get(run_id)
        return answer == (decode_run(record) if record is not None else None)
    return {t.thread_id: t for t in answer.threads}.get(thread_id) == seen.thread
