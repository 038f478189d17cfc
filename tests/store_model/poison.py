"""Poison in a model test, and the operator's answer to it."""

from __future__ import annotations

import contextlib
import random
from typing import Any

from bufstore.errors import BufstoreError, FlushTimeout, Unavailable
from bufstore.jetstream.messages import Outgoing
from bufstore.threads.model import Run
from bufstore.types import Receipt
from store_model.calls import Call
from store_model.drafts import Drafts
from store_model.story import BAD_RUN, Event
from store_model.world import THREADS, Instance, Violation


class Poison(Drafts):
    """Steps with malformed entries, with entries that the store refuses, and with the quarantine."""

    def fault(self, what: str, rough_s: float = 15.0) -> None:
        """Note that something fails now."""
        self.world.weather.seen[what] += 1
        self.world.weather.rough(rough_s)

    async def garbage(self, chance: random.Random) -> None:
        """Publish a malformed group, or a sound group with a malformed entry, as a foreign process may."""
        thread_id, header = chance.choice(THREADS[:2]), chance.choice((None, "1.0.x"))
        lane = self.world.lane(thread_id)
        if chance.random() < 0.5:
            lane.stream.store([Outgoing(lane.subjects.groups, b"garbage", header)])
        else:
            lane.stream.write_entries([(thread_id, header, b"garbage")])
        self.fault("garbage", 5)

    async def poison(self, chance: random.Random) -> None:
        """Write a checkpoint that the store refuses, and entries behind it."""
        thread_id = chance.choice(THREADS[:2])
        await self._refused(chance, thread_id)
        for _ in range(chance.choice((0, 0, 1, 2))):
            if chance.random() < 0.5:
                self.world.lane(thread_id).stream.write_entries([(thread_id, None, b"garbage")])
            await self._make(chance, self._call(chance, thread_id))

    async def _refused(self, chance: random.Random, thread_id: str) -> None:
        self._number += 1
        run = Run(run_id=f"{BAD_RUN}-{self._number}", thread_id=thread_id)
        messages = self._messages(chance, 1)

        async def do(store: Any, key: str | None) -> Receipt:
            receipt: Receipt = await store.checkpoint_append(thread_id, messages, run, idempotency_key=key)
            return receipt

        self.fault("poison", 5)
        await self._make(chance, Call("checkpoint_append", thread_id, do))

    async def quarantine(self, chance: random.Random) -> None:
        """Replay a thread after its cause is mended, or discard entries, as an operator does."""
        world = self.world
        entries = [e for lane in world.lanes for e in lane.ledger.parked.entries.values()]
        parked = sorted({e.thread_id for e in entries if e.thread_id})
        thread_id = chance.choice(parked or THREADS[:2])
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
        waiting = self._parked(thread_id)
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
        before = set(waiting)
        world.postgres.mended = thread_id
        try:
            outcomes = await instance.call(store.lanes.of(thread_id).quarantine.replay_thread(thread_id))
        except BufstoreError:
            outcomes = None
        finally:
            world.postgres.mended = None
        left = self._parked(thread_id)
        if before != left:
            self._happened(thread_id, replayed=sorted(before - left))
        if outcomes is not None and [(o.seq, o.outcome) for o in outcomes] != expected:
            raise Violation(f"replayed {thread_id}: {outcomes}, expected {expected}")
        world.weather.seen["replayed"] += len(before - left)

    async def _discard(self, instance: Instance, thread_id: str, gone: list[int]) -> None:
        world, store = self.world, instance.store
        assert store is not None
        with contextlib.suppress(BufstoreError):
            await instance.call(store.lanes.of(thread_id).quarantine.discard(gone))
        left = sorted(set(gone) - self._parked(thread_id))
        if left:
            self._happened(thread_id, discarded=left)
        world.weather.seen["discarded"] += len(left)

    def _parked(self, thread_id: str) -> set[int]:
        """The positions of the thread's entries in quarantine."""
        entries = self.world.lane(thread_id).ledger.parked.entries
        return {seq for seq, e in entries.items() if e.thread_id == thread_id}

    def _happened(self, thread_id: str, **what: list[int]) -> None:
        story = self.world.archive.story(thread_id)
        story.events.append(Event(self.world.flushed(thread_id), **what))
        story.tell_again()
