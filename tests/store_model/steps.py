"""The steps of a model test: calls, reads, faults, poison; each step with its own checks."""

from __future__ import annotations

import asyncio
import random

from bufstore.memory.log import MemoryFeed
from bufstore.threads.repairing import repair
from bufstore.types import Consistency
from store_model.faults import LOG_FAULTS, STORE_FAULTS
from store_model.poison import Poison
from store_model.reads import Reads
from store_model.world import THREADS, Lane, Violation


class Steps(Reads, Poison):
    """All steps of a world: each public coroutine is a step, called by its name."""

    def step(self, name: str, chance: random.Random) -> None:
        """Do the step of this name, and check everything."""
        self.world.counts[f"step {name}"] += 1
        self.world.audit = self.witness.audit
        self.world.run(getattr(self, name)(chance))

    # --- calls ------------------------------------------------------------------------------------------------

    async def write(self, chance: random.Random) -> None:
        """Make one call, or several at once, mostly on one thread."""
        thread_id = chance.choice(THREADS)
        count = chance.choice((1, 1, 1, 2, 3))
        calls = [
            self._call(chance, thread_id if chance.random() < 0.8 else chance.choice(THREADS)) for _ in range(count)
        ]
        await asyncio.gather(*(self._make(chance, call) for call in calls))

    async def burst(self, chance: random.Random) -> None:
        """Make enough appends for a batch."""
        threads = [chance.choice(THREADS) for _ in range(12)]
        await asyncio.gather(*(self._make(chance, self._checkpoint_append(chance, t)) for t in threads))

    async def retry(self, chance: random.Random) -> None:
        """Repeat a call whose outcome is unknown, with its key."""
        unknown = [c for c in self.witness.calls if c.outcome == "unknown" and c.key is not None and not c.entries]
        if unknown:
            await self._make(chance, chance.choice(unknown[-3:]))

    async def wait(self, chance: random.Random) -> None:
        """Let time pass."""
        await asyncio.sleep(chance.choice((0.1, 0.3, 1, 3, 10, 40)))

    # --- faults -----------------------------------------------------------------------------------------------

    async def crash(self, chance: random.Random) -> None:
        """Kill a process, maybe in the middle of calls, and mostly start it again."""
        instance = chance.choice(self.world.instances)
        self.fault("crash")
        calls = [self._call(chance, chance.choice(THREADS)) for _ in range(chance.choice((0, 1, 2)))]

        async def gone() -> None:
            await asyncio.sleep(chance.choice((0, 0, 0.01, 0.1)))
            await instance.crash()

        await asyncio.gather(gone(), *(self.witness.make(instance, call) for call in calls))
        if chance.random() < 0.8:
            await instance.start()

    async def restart(self, chance: random.Random) -> None:
        """Close a process and open it again, or only open it."""
        instance = chance.choice(self.world.instances)
        self.fault("restart")
        await instance.stop()
        await instance.start()

    async def pause(self, chance: random.Random) -> None:
        """Stop a process in the middle of calls, maybe until all it knows is purged, and let it go on."""
        number = chance.choice((0, 1))
        instance, seconds = self.world.instances[number], chance.choice((0.5, 5, 50, 120))
        self.fault("pause", seconds + 30)
        calls = [self._call(chance, chance.choice(THREADS)) for _ in range(chance.choice((1, 2, 3)))]

        async def stand_still() -> None:
            await asyncio.sleep(chance.choice((0, 0, 0.001, 0.01, 0.1)))
            self.world.loop.stop_process(number, seconds)
            self.world.stood_still += seconds
            await asyncio.sleep(seconds)

        async def others() -> None:
            other = self.world.instances[1 - number]
            for _ in range(chance.choice((0, 1, 3))):
                await asyncio.sleep(chance.choice((0.1, 5, 40)))
                await self.witness.make(other, self._call(chance, chance.choice(THREADS)))

        await asyncio.gather(stand_still(), others(), *(self.witness.make(instance, call) for call in calls))
        await asyncio.sleep(chance.choice((0, 1)))

    async def log_faults(self, chance: random.Random) -> None:
        """Let the next writes to the log fail."""
        self.world.weather.log.extend(chance.choice((*LOG_FAULTS, "")) for _ in range(chance.choice((1, 2, 4))))
        self.fault("log faults")
        await self.write(chance)

    async def come_late(self, chance: random.Random) -> None:
        """Purge a thread's entries; then send a write two ways, one of which takes very long."""
        await asyncio.sleep(50)
        self.world.weather.log.append("very late")
        self.fault("very late")
        await self._make(chance, self._call(chance, chance.choice(THREADS)))
        await asyncio.sleep(chance.choice((0, 20, 55)))

    async def be_overtaken(self, chance: random.Random) -> None:
        """Hold a write up until entries of others are flushed and purged; it lands, and is repeated."""
        thread_id, beside = chance.choice(self._neighbours())

        async def go_on() -> None:
            """Add an entry to the partition, because the entry at its cursor stays in the log."""
            await self._make(chance, self._checkpoint(chance, beside))
            await asyncio.sleep(chance.choice((20, 45, 50)))

        await go_on()
        self.fault("held up", 100)
        self.world.weather.log.append("held up")
        held = chance.choice((self._checkpoint, self._checkpoint_append))(chance, thread_id)
        instance = self._instance(chance)
        await self.witness.make(instance, held)
        await asyncio.sleep(1)
        for _ in range(chance.choice((0, 1, 1, 2))):
            await self._make(chance, self._call(chance, thread_id))
        await go_on()
        await asyncio.sleep(max(0.0, self.world.weather.late_until - self.world.loop.time()) + chance.choice((0, 1)))
        for _ in range(chance.choice((0, 0, 1))):
            await self._make(chance, self._call(chance, thread_id))
        for one in chance.sample((instance, *self.world.instances), chance.choice((1, 2))):
            self.witness.audit()
            if held.outcome == "unknown" and held.key is not None and not held.entries:
                await self.witness.make(one, held)
        await self._make(chance, self._call(chance, thread_id))

    async def store_faults(self, chance: random.Random) -> None:
        """Let the next calls of Postgres fail, before or after they took effect."""
        self.world.weather.store.extend(chance.choice((*STORE_FAULTS, "")) for _ in range(chance.choice((1, 2, 4))))
        self.fault("store faults")
        await self.write(chance)

    async def hold_row(self, chance: random.Random) -> None:
        """Lock a thread's row, maybe for so long that the log drops the waiting entries."""
        thread_id = chance.choice(THREADS)
        locked, seconds = self.world.lane(thread_id).ledger.locked, chance.choice((0.3, 3, 30, 100))
        if thread_id in locked:
            locked.discard(thread_id)
            return
        locked.add(thread_id)
        self.world.loop.call_later(seconds, locked.discard, thread_id)
        self.fault("row held", seconds + 15)
        for _ in range(chance.choice((1, 2, 3))):
            await self._make(chance, self._call(chance, thread_id))
            await asyncio.sleep(chance.choice((0, 1)))

    async def store_outage(self, chance: random.Random) -> None:
        """Take Postgres away for a while."""
        seconds = chance.choice((0.5, 3, 20))
        self.world.weather.store_away_until = self.world.loop.time() + seconds
        self.fault("store outage", seconds + 15)

    async def log_outage(self, chance: random.Random) -> None:
        """Take NATS away for a while: connections break, feeds end."""
        seconds = chance.choice((0.5, 2, 8))
        self.world.weather.log_away_until = self.world.loop.time() + seconds
        self.fault("log outage", seconds + 15)
        for feed in self._feeds():
            feed.lose("the connection was lost")

    async def lose_feed(self, chance: random.Random) -> None:
        """Lose a delivery: the partition is taken again, and unacknowledged entries are delivered again."""
        feeds = self._feeds()
        if feeds:
            chance.choice(feeds).lose("a delivery is missing")
            self.fault("feed lost")

    async def other_owner(self, chance: random.Random) -> None:
        """Raise terms in the name of another member, or list another member for a while."""
        lane = chance.choice(self.world.lanes)
        partitions = [p for p in range(lane.config.log.partitions) if chance.random() < 0.5]
        self.fault("other owner")
        if chance.random() < 0.5:
            await lane.ledger.take(partitions, "somebody else")
        else:
            lane.bucket.put("member", "ghost", None, ttl_s=chance.choice((1, 4)))
            lane.bucket.tell("call", -1)

    async def lose_hot_state(self, chance: random.Random) -> None:
        """Lose a bucket with its content."""
        chance.choice(self.world.lanes).bucket.clear()
        self.fault("hot state lost")

    async def fail_over(self, chance: random.Random) -> None:
        """Let Postgres fall back to an older copy of itself."""
        self.fault("failover", 30)
        self.world.fail_over(chance.choice((1, 2, 5, 20)))

    async def repair(self, chance: random.Random) -> None:
        """Once all is flushed, remove the end of a log or all of it; then repair, as an operator does."""
        world, lane = self.world, chance.choice(self.world.lanes)
        given_up = any(e.discarded for s in world.archive.stories.values() for e in s.events)
        if given_up or world.loop.time() < world.weather.late_until:
            return  # a repair finds discarded entries in the log, and puts them into quarantine again
        self.fault("repair", 40)
        world.weather.calm()
        for each in world.lanes:
            each.ledger.locked.clear()
        for instance in world.instances:
            await instance.stop()
        self.witness.audit()
        stream = lane.stream
        if not stream.messages or any(world.flushed(t) < world.end_of(t) for t in THREADS):
            await world.start()
            return
        if chance.random() < 0.5:
            del world.nats.streams[lane.config.log.stream]
        else:
            # No more than a row's ring remembers: a repair parks older entries, which it cannot judge.
            stream.lose_end(chance.randint(1, min(8, len(stream.messages))))
        await asyncio.sleep(10)  # after this time, killed members are no longer listed
        repaired = await repair(
            world.postgres.store, nats=world.nats, config=world.config, apply=True, lane=lane.config.log.lane
        )
        if repaired.reason is not None and not repaired.done:
            raise Violation(f"not repaired: {repaired}")
        world.weather.seen["repaired"] += repaired.done
        world.copies.clear()  # the old copies belong to another log
        await world.start()

    def _neighbours(self) -> list[tuple[str, str]]:
        """Pairs of threads in one partition of one lane."""

        def place(thread_id: str) -> tuple[Lane, int]:
            lane = self.world.lane(thread_id)
            return lane, lane.subjects.partition(thread_id)

        return [(a, b) for a in THREADS for b in THREADS if a != b and place(a) == place(b)]

    def _feeds(self) -> list[MemoryFeed]:
        return [feed for lane in self.world.lanes for feed in lane.stream.feeds]

    # --- the end ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Heal everything, and check that everything is there."""
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
        """Check that each entry that was not applied is in quarantine, unless it was superseded or discarded."""
        world = self.world
        entries = world.lane(thread_id).ledger.parked.entries
        story = world.archive.story(thread_id)
        waiting = {seq: e.base_id for seq, e in entries.items() if e.thread_id == thread_id}
        missing = story.parked.keys() - waiting.keys()
        now = story.at(story.end).applied_id
        # A refused entry whose thread is deleted in the same flush never reaches the store.
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
