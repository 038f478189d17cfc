"""The writer of groups on a stream that fails in all ways in which a network and a server can."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import elapsed
from bufstore.buffer.groups import sequencer
from bufstore.buffer.groups.choosing import Queued, choose, count_fitting
from bufstore.buffer.groups.group import Group, decode_entry, decode_header, hash_of, size_of
from bufstore.buffer.groups.heads import Heads
from bufstore.buffer.groups.oversize import joined
from bufstore.buffer.groups.sequencer import Sequencer
from bufstore.buffer.groups.tail import Tail, Written
from bufstore.buffer.places import ENTRIES_MAX, place
from bufstore.buffer.subjects import Subjects
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import Closed, LogFull, LogUnavailable
from bufstore.jetstream.errors import MessageTooLarge
from bufstore.jetstream.group_commit import AppendUnit
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, Part, StoredMessage
from bufstore.memory.log import MemoryListener, MemoryLog, MemoryStream
from thorough import examples, seldom
from unit.fake_log import run

CONFIG = BufferConfig(log=LogConfig(partitions=3, max_bytes=1 << 30))
SUBJECTS = Subjects(CONFIG.log.subject, 3)
FAULTS = ("", "", "", "lost", "stored", "late", "doubled", "unavailable", "full", "slow", "junk", "away", "shrunk")
_TIMEOUT_S = 2.0
_PARTS_LAST_S = CONFIG.log.failover_window_s / 2


@pytest.fixture(scope="module", autouse=True)
def _soon_alone() -> Iterator[None]:
    """Count a writer as alone after one group, so that the worlds here meet both ways of sending."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequencer, "_LONE", 1)
        yield


class World:
    """One stream, and several processes that write to it."""

    def __init__(self, chance: random.Random, faults: Sequence[str] = ()) -> None:
        self.chance, self.faults = chance, faults
        self.stream = MemoryStream(CONFIG.log)
        self.away_until = 0.0
        self.late: list[asyncio.TimerHandle] = []
        self.seen: Counter[str] = Counter()

    def groups(self) -> list[tuple[Group, StoredMessage]]:
        """All groups in the stream."""
        return [
            (decode_header(m), m) for m in self.stream.messages if m.subject == SUBJECTS.groups and m.body != b"junk"
        ]

    def entries(self) -> list[tuple[int, str, bytes, int]]:
        """Place, thread, payload and link of all entries in the stream."""
        return [
            (at, (e := decode_entry(group, n, m.body)).thread_id, self._whole(e), r.prev)
            for group, m in self.groups()
            for n, (at, r) in enumerate(group.places())
        ]

    def _whole(self, entry: Any) -> bytes:
        if not entry.elsewhere:
            return bytes(entry.payload)
        of = {m.seq: m for m in self.stream.messages}

        async def read(seq: int) -> StoredMessage | None:
            return of.get(seq)

        work = joined(entry.payload, read)
        try:
            work.send(None)
        except StopIteration as e:
            return bytes(e.value)
        raise AssertionError

    def purge_late(self) -> None:
        for handle in self.late:
            handle.cancel()


class Faulty(MemoryLog):
    """One process's connection to the stream, with faults."""

    def __init__(self, world: World, message_bytes_max: int) -> None:
        super().__init__({CONFIG.log.stream: world.stream}, CONFIG, message_bytes_max)
        self.world = world
        self.lose_groups = False
        #: The largest message that the server takes now, and at first; the client knows of `message_bytes_max`.
        self.taken_bytes_max = self.once_bytes_max = message_bytes_max

    def shrink(self) -> None:
        """Let the server take only smaller messages from now on, without telling its clients."""
        self.taken_bytes_max = min(self.taken_bytes_max, 2048)

    async def _turn(self) -> MemoryStream:
        world = self.world
        for _ in range(world.chance.choice((0, 0, 1, 3))):
            await asyncio.sleep(0)
        if asyncio.get_running_loop().time() < world.away_until:
            await asyncio.sleep(world.chance.choice((0, 0.3)))
            raise LogUnavailable("away")
        return await super()._turn()

    async def publish(self, message: Outgoing, timeout_s: float) -> int:
        world, loop = self.world, asyncio.get_running_loop()
        size = len(message.body) + len(message.header or "")
        assert size + 100 <= self.once_bytes_max, "the server would close the connection"
        if size > self.message_bytes_max:
            raise MessageTooLarge("max_payload")
        if size > self.taken_bytes_max:
            self.message_bytes_max = self.taken_bytes_max  # the next connection learns of it
            raise AppendUnknown("the server closed the connection")
        fault = world.chance.choice(world.faults) if world.faults else ""
        if self.lose_groups and message.subject == SUBJECTS.groups:
            fault = "lost"
        world.seen[fault] += 1
        stream = await self._turn()
        match fault:
            case "unavailable":
                raise LogUnavailable("no leader")
            case "full":
                raise LogFull("full")
            case "lost":
                await asyncio.sleep(timeout_s)
                raise AppendUnknown("no answer")
            case "stored":
                with contextlib.suppress(Conflict):
                    stream.store([message])
                raise AppendUnknown("no answer")
            case "late" | "doubled":
                delay = world.chance.choice((0.0, 0.01, 0.1, 3, 20))
                world.late.append(loop.call_later(delay, self._arrive, message))
                if fault == "late":
                    raise AppendUnknown("no answer")
            case "slow":
                await asyncio.sleep(1)
            case "shrunk":
                self.shrink()
            case "junk":
                stream.store([Outgoing(SUBJECTS.groups, b"junk", world.chance.choice((None, "G1.0.x")))])
            case "away":
                world.away_until = loop.time() + world.chance.choice((0.1, 3))
        seq = stream.store([message])
        for _ in range(world.chance.choice((0, 0, 2))):
            await asyncio.sleep(0)
        return seq

    async def tell(self, subject: str, words: bytes) -> None:
        assert len(words) + 100 <= self.once_bytes_max, "the server would close the connection"
        await super().tell(subject, words)

    async def listen(self, subject: str, heard: Callable[[bytes], None]) -> MemoryListener:
        """Listen; what is told may be lost, late or doubled, as faults say."""
        return await super().listen(subject, self._rumour(heard))

    def _rumour(self, tell: Callable[..., None]) -> Callable[..., None]:
        def told(*what: Any) -> None:
            fate = self.world.chance.choice(("", "", "", "lost", "late", "doubled")) if self.world.faults else ""
            self.world.seen[f"told {fate}"] += 1
            if fate in ("", "doubled"):
                tell(*what)
            if fate in ("late", "doubled"):
                delay = self.world.chance.choice((0.0, 0.001, 0.1, 3))
                self.world.late.append(asyncio.get_running_loop().call_later(delay, tell, *what))

        return told

    def _arrive(self, message: Outgoing) -> None:
        try:
            self.world.stream.store([message])
            self.world.seen["landed late"] += 1
        except Conflict:
            pass


class Unit(AppendUnit, kw_only=True, eq=False):
    """A unit that records each of its ends."""

    payloads: list[bytes]
    ends: list[int | Exception] = msgspec.field(default_factory=list)
    done: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    gone: bool = False

    @property
    def given_up(self) -> bool:
        return self.gone

    def ended(self, outcome: int | Exception) -> None:
        self.ends.append(outcome)
        self.done.set()


class Process:
    """A writer of groups, as `GroupLog` makes it."""

    def __init__(self, world: World, message_bytes_max: int = 4096, log: Faulty | None = None) -> None:
        self.world = world
        self.log = log if log is not None else Faulty(world, message_bytes_max)
        self.heads = Heads()
        self.tail = Tail(self.log, SUBJECTS.groups, self.heads, self._nothing, lambda: None, 5.0)
        self.sequencer = Sequencer(self.log, SUBJECTS, self.heads, self.tail, lambda: None, _TIMEOUT_S)
        note = self.tail.note

        def noted(written: Written) -> None:
            self.written.append(written)
            note(written)

        self.tail.note = noted  # type: ignore[method-assign]
        self.units: list[Unit] = []
        self.payloads = 0
        self.written: list[Written] = []

    async def _nothing(self) -> int:
        return 0

    def unit(self, thread_id: str, expected: int | None, count: int = 1, size: int = 10) -> Unit:
        payloads = [f"{id(self)}.{self.payloads + n}.".encode().ljust(size, b"x") for n in range(count)]
        self.payloads += count
        subject = SUBJECTS.of(thread_id)
        messages = [Outgoing(subject, p, "1.h", expected if not n else None) for n, p in enumerate(payloads)]
        unit = Unit(messages, payloads=payloads)
        self.units.append(unit)
        return unit

    def add(self, *arguments: Any, **options: Any) -> Unit:
        unit = self.unit(*arguments, **options)
        self.sequencer.add(unit)
        return unit

    async def write(self, thread_id: str, chance: random.Random, **options: Any) -> None:
        """Write as a lane does: look up the thread's last entry, and expect it."""
        for _ in range(3):
            try:
                await self.tail.see_all()
                break
            except LogUnavailable:
                await asyncio.sleep(0.2)
        else:
            return
        expected = self.heads.head(hash_of(thread_id))
        if chance.random() < 0.1:
            expected = chance.choice((0, place(1, 0), expected + 1))
        unit = self.add(thread_id, None if chance.random() < 0.1 else expected, **options)
        if chance.random() < 0.1:
            await asyncio.sleep(chance.choice((0, 0.01)))
            unit.gone = True
            return
        await unit.done.wait()


def check(world: World, processes: Sequence[Process]) -> None:
    """Check that every unit ended once, and that the stream agrees."""
    entries = world.entries()
    at_of: dict[bytes, list[int]] = {}
    for at, _, payload, _ in entries:
        at_of.setdefault(payload, []).append(at)
    for process in processes:
        for unit in process.units:
            found = [at for payload in unit.payloads for at in at_of.get(payload, [])]
            if unit.gone and not unit.ends:
                assert not found
                continue
            (end,) = unit.ends
            if isinstance(end, int):
                assert found == list(range(end - len(unit.payloads) + 1, end + 1))
            elif isinstance(end, AppendUnknown):
                assert len(found) in (0, len(unit.payloads))
            else:
                assert isinstance(end, (Conflict, LogFull, LogUnavailable, Closed)), end
                assert found == [], end
    last: dict[str, int] = {}
    for at, thread_id, _, prev in entries:
        assert prev == last.get(thread_id, 0), "the links of a thread form one chain"
        last[thread_id] = at
    before, before_id = 0, 0
    for message in world.stream.messages:
        if message.subject == SUBJECTS.groups:
            if message.body == b"junk":
                before, before_id = message.seq, 0
                continue
            group = decode_header(message)
            assert (group.before, group.before_id) == (before, before_id)
            before, before_id = group.seq, group.id


async def settle(world: World, processes: Sequence[Process]) -> None:
    """End all faults, and wait until every unit has ended."""
    world.faults = ()
    async with asyncio.timeout(60):
        for process in processes:
            for unit in process.units:
                if not unit.gone:
                    await unit.done.wait()
    await asyncio.sleep(30)  # late messages arrive
    for process in processes:
        await process.tail.see_all()
    assert len({(p.heads.seen, p.heads.seen_id) for p in processes}) == 1
    for process in processes:
        for thread_id in ("a", "b", "c", "d"):
            truth = max((at for at, t, _, _ in world.entries() if t == thread_id), default=0)
            assert process.heads.head(hash_of(thread_id)) == truth


@given(st.integers(0, 2**32), st.integers(1, 3))
@examples(150)
def test_every_unit_ends_once_and_as_it_was_told(seed: int, count: int) -> None:
    async def main() -> None:
        chance = random.Random(seed)
        world = World(chance, FAULTS)
        processes = [Process(world) for _ in range(count)]
        for process in processes:
            process.sequencer.start()

        async def writer(process: Process) -> None:
            for _ in range(chance.choice((1, 3, 6))):
                size = chance.choice((1, 1, 1, 500, 9000))
                units = chance.choice((1, 1, 2, 5))
                await process.write(chance.choice("abcd"), chance, count=units, size=size)
                await asyncio.sleep(chance.choice((0, 0, 0.01, 1)))

        tasks = [asyncio.create_task(writer(p)) for p in processes for _ in range(chance.choice((1, 3)))]
        async with asyncio.timeout(600):
            for task in tasks:
                await asyncio.wait([task], timeout=100)
                world.faults = () if not task.done() else world.faults
            await asyncio.gather(*tasks)
        await settle(world, processes)
        check(world, processes)
        for process in processes:
            await process.sequencer.aclose()
        world.purge_late()

    random.seed(seed)
    run(main())


@given(st.integers(0, 2**32), st.integers(0, 60))
@examples(100)
def test_closing_at_any_moment_ends_everything_once_and_leaves_nothing(seed: int, turns: int) -> None:
    async def main() -> None:
        chance = random.Random(seed)
        world = World(chance, FAULTS)
        process = Process(world)
        process.sequencer.start()
        for number in range(chance.choice((1, 4))):
            process.add("abcd"[number], 0, count=chance.choice((1, 3)), size=chance.choice((1, 9000)))
        for _ in range(turns):
            await asyncio.sleep(0 if chance.random() < 0.9 else 0.5)
        await process.sequencer.aclose()
        late = process.add("a", 0)
        await asyncio.sleep(0)
        (end,) = late.ends
        assert isinstance(end, Closed)
        world.faults = ()
        await asyncio.sleep(30)
        assert all(len(unit.ends) == 1 for unit in process.units)
        check(world, [process])
        world.purge_late()

    random.seed(seed)
    run(main())


async def started(world: World, count: int = 1, **options: Any) -> list[Process]:
    processes = [Process(world, **options) for _ in range(count)]
    for process in processes:
        await process.tail.see_all()
        process.sequencer.start()
    return processes


def test_what_was_overtaken_ends_with_conflict_and_the_rest_of_its_group_is_stored() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        one, two = await started(world, 2)
        await asyncio.wait_for(one.add("a", 0).done.wait(), 5)
        units = [two.add("a", 0), two.add("b", 0)]
        for unit in units:
            await asyncio.wait_for(unit.done.wait(), 5)
        assert isinstance(units[0].ends[0], Conflict)
        assert units[1].ends == [place(2, 0)]
        assert two.sequencer.refusals == 1
        check(world, [one, two])
        for process in (one, two):
            await process.sequencer.aclose()

    run(main())


class Away(Faulty):
    """A process that is `way_s` away from the server, and counts its reads."""

    def __init__(self, world: World, way_s: float) -> None:
        super().__init__(world, 1 << 20)
        self.way_s = way_s
        self.reads = 0
        self.arriving: list[asyncio.Task[None]] = []

    async def publish(self, message: Outgoing, timeout_s: float) -> int:
        await asyncio.sleep(self.way_s)
        try:
            return (await self._turn()).store([message])
        finally:
            await asyncio.sleep(self.way_s)

    async def part(self, subject: str, seq: int, timeout_s: float, limit: int, bytes_max: int = 0) -> Part:
        self.reads += 1
        await asyncio.sleep(2 * self.way_s)
        return await super().part(subject, seq, timeout_s, limit, bytes_max)

    async def tell(self, subject: str, words: bytes) -> None:
        tell = super().tell

        def arrives() -> None:
            self.arriving.append(asyncio.get_running_loop().create_task(tell(subject, words)))

        self.world.late.append(asyncio.get_running_loop().call_later(self.way_s, arrives))

    def _rumour(self, tell: Callable[..., None]) -> Callable[..., None]:
        return lambda *what: asyncio.get_running_loop().call_later(self.way_s, tell, *what)


@pytest.mark.parametrize("way_s", [0.05, *seldom(0.1, 0.15)])
def test_a_writer_that_is_far_away_gets_its_turns_and_leaves_time_to_those_that_are_near(way_s: float) -> None:
    async def main() -> None:
        world = World(random.Random(1))
        processes = [Process(world, log=Away(world, way)) for way in (0.001, 0.001, 0.001, way_s)]
        for process in processes:
            await process.tail.see_all()
            process.sequencer.start()

        async def writer(process: Process, thread_id: str) -> None:
            while asyncio.get_running_loop().time() < 15:
                await process.add(thread_id, None).done.wait()

        callers = [(process, f"{n}-{c}") for n, process in enumerate(processes) for c in range(2)]
        await asyncio.gather(*(writer(*caller) for caller in callers))
        check(world, processes)
        *near, far = [process.sequencer.groups for process in processes]
        assert far >= 15 / (10 * way_s), far  # one in five of its round trips
        assert min(near) >= 0.9 * max(near), near
        # Alone, the near ones write a group every 4 ms. A turn of the far one takes four ways.
        assert sum(near) >= 0.6 * (15 - 4 * way_s * far) / 0.004, near
        for process in processes:
            await process.sequencer.aclose()

    run(main())


@pytest.mark.long
@pytest.mark.parametrize("ways_s", [[0.001] * 7 + [0.01], *seldom([0.001] * 8)])
def test_writers_at_the_same_time_take_turns_and_nobody_asks_what_was_faster(ways_s: Sequence[float]) -> None:
    async def main() -> None:
        world = World(random.Random(1))
        logs = [Away(world, way_s) for way_s in ways_s]
        processes = [Process(world, log=log) for log in logs]
        for process in processes:
            await process.tail.see_all()
            process.sequencer.start()

        async def writer(process: Process, thread_id: str) -> None:
            at = 0
            while asyncio.get_running_loop().time() < 10:
                unit = process.add(thread_id, at)
                await unit.done.wait()
                at = unit.ends[0]
                assert isinstance(at, int)

        callers = [(process, f"{n}-{c}") for n, process in enumerate(processes) for c in range(4)]
        await asyncio.gather(*(writer(*caller) for caller in callers))
        check(world, processes)
        groups = [process.sequencer.groups for process in processes]
        assert sum(groups) > 1000
        assert min(groups) >= max(groups) / 2, groups
        assert sum(process.sequencer.refusals for process in processes) < sum(groups) / 20
        assert sum(log.reads for log in logs) < sum(groups) / 20
        for process in processes:
            await process.sequencer.aclose()

    run(main())


def test_of_many_who_begin_at_the_same_moment_each_is_refused_once() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        processes = [Process(world, log=Away(world, 0.001)) for _ in range(16)]
        for process in processes:
            await process.tail.see_all()
            process.sequencer.start()
        units = [process.add(f"thread {n}", 0) for n, process in enumerate(processes)]
        await asyncio.gather(*(unit.done.wait() for unit in units))
        check(world, processes)
        # If all of them tried again at the same moment, each would be refused a second time.
        assert sum(process.sequencer.refusals for process in processes) <= 1.5 * len(processes)
        for process in processes:
            await process.sequencer.aclose()

    run(main())


class Slow(Faulty):
    """A process that begins to listen late."""

    async def listen(self, subject: str, heard: Callable[[bytes], None]) -> MemoryListener:
        await asyncio.sleep(self.world.chance.random() * 0.002)
        return await super().listen(subject, heard)


def test_who_is_refused_and_hears_of_refusals_listens_once_and_stops() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        processes = [Process(world, log=Slow(world, 1 << 20)) for _ in range(6)]
        for process in processes:
            await process.tail.see_all()
            process.sequencer.start()

        async def write(process: Process, thread_id: str) -> None:
            for _ in range(10):
                await process.add(thread_id, None).done.wait()
                await asyncio.sleep(world.chance.random() * 0.002)

        for _ in range(5):
            await asyncio.gather(*(write(process, str(n)) for n, process in enumerate(processes)))
            listening = Counter(listener.subject for listener in world.stream.listeners)
            assert 0 < listening[SUBJECTS.writers] <= len(processes)
            await asyncio.sleep(4)
            assert {listener.subject for listener in world.stream.listeners} == {SUBJECTS.refused}
        for process in processes:
            await process.sequencer.aclose()
        assert not world.stream.listeners

    run(main())


def test_a_writer_whose_task_is_ended_while_it_waits_for_its_turn_does_not_begin_again_and_again() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        one, two = await started(world, 2)
        two.sequencer._others.go_first = asyncio.Event().wait  # type: ignore[method-assign]
        unit = two.add("a", 0)
        await asyncio.sleep(0.1)
        task = two.sequencer._task
        assert task is not None
        task.cancel()
        await asyncio.sleep(0.1)
        assert two.sequencer._task is None
        for process in (one, two):
            await process.sequencer.aclose()
        assert isinstance(unit.ends[0], Closed)

    run(main())


@pytest.mark.parametrize("begun", [False, True])
def test_who_waits_for_a_task_that_somebody_ended_is_served_without_another_write(begun: bool) -> None:
    """Regression: also the next write was not served, if the task was ended before it began."""

    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world)
        if begun:
            one.sequencer._others.go_first = asyncio.Event().wait  # type: ignore[method-assign]
        unit = one.add("a", 0)
        if begun:
            await asyncio.sleep(0.1)
            del one.sequencer._others.go_first
        task = one.sequencer._task
        assert task is not None
        task.cancel()
        await asyncio.wait_for(unit.done.wait(), 1)
        assert unit.ends == [place(1, 0)]
        await one.sequencer.aclose()

    run(main())


class Ended(Faulty):
    """A connection that may have ended for good, so that nothing of it can be asked."""

    ended = False

    @property
    def message_bytes_max(self) -> int:
        if self.ended:
            raise Closed("it has ended")
        return self._bytes_max

    @message_bytes_max.setter
    def message_bytes_max(self, value: int) -> None:
        self._bytes_max = value

    async def publish(self, message: Outgoing, timeout_s: float) -> int:
        self.message_bytes_max  # noqa: B018 - it raises
        return await super().publish(message, timeout_s)


def test_a_log_that_is_closed_fails_what_is_written_and_is_not_tried_again_and_again() -> None:
    """Regression: the task that writes failed at once, and was begun again at once, for as long as a unit waited."""

    async def main() -> None:
        world = World(random.Random(1))
        log = Ended(world, 4096)
        (one,) = await started(world, log=log)
        log.ended = True
        unit = one.add("a", 0)
        await asyncio.wait_for(unit.done.wait(), 1)
        (end,) = unit.ends
        assert isinstance(end, Closed)
        assert not one.sequencer._waiting
        await one.sequencer.aclose()

    run(main())


@pytest.mark.parametrize("begun", [False, True])
def test_a_unit_whose_parts_somebody_keeps_from_being_stored_ends_at_once(begun: bool) -> None:
    """Regression: if their task had not begun, it waited until its deadline, and counted as the oldest for good."""

    async def main() -> None:
        world = World(random.Random(1), ["slow"])
        (one,) = await started(world)
        unit = one.add("a", 0, size=9**6)
        (task,) = one.sequencer._large._tasks
        if begun:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait_for(unit.done.wait(), 1)
        assert isinstance(unit.ends[0], LogUnavailable)
        assert one.sequencer.oldest is None
        await one.sequencer.aclose()

    run(main())


def test_what_expects_nothing_goes_behind_whatever_came_meanwhile() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        one, two = await started(world, 2)
        await two.tail.see_all()
        await asyncio.wait_for(one.add("a", None).done.wait(), 5)
        unit = two.add("a", None)
        await asyncio.wait_for(unit.done.wait(), 5)
        assert unit.ends == [place(2, 0)]
        check(world, [one, two])  # the link names the other's entry
        for process in (one, two):
            await process.sequencer.aclose()

    run(main())


def test_nothing_else_is_sent_while_a_group_has_no_answer() -> None:
    async def main() -> None:
        world = World(random.Random(1), ["lost"])
        (one,) = await started(world)
        first = one.add("a", 0)
        await asyncio.sleep(0.5)
        second = one.add("b", 0)
        await asyncio.sleep(5)
        assert not second.done.is_set()
        world.faults = ()
        await asyncio.wait_for(second.done.wait(), 10)
        assert (first.ends, second.ends) == ([place(1, 0)], [place(2, 0)])
        await one.sequencer.aclose()

    run(main())


def test_a_unit_that_is_given_up_before_it_is_sent_is_not_stored() -> None:
    async def main() -> None:
        world = World(random.Random(1), ["slow"])
        (one,) = await started(world)
        first = one.add("a", 0)
        await asyncio.sleep(0.1)
        future = one.sequencer.submit([Outgoing(SUBJECTS.of("b"), b"never", "1.h", 0)])
        future.cancel()
        await asyncio.wait_for(first.done.wait(), 10)
        await asyncio.sleep(5)
        assert b"never" not in [payload for _, _, payload, _ in world.entries()]
        await one.sequencer.aclose()

    run(main())


def test_large_units_fit_into_messages() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world, message_bytes_max=8192)
        units = [
            one.add("a", 0, count=40, size=1000),
            one.add("b" * 600, 0, count=4, size=1),
            one.add("c", 0, size=9**5),
        ]
        none = one.add("d" * 600, 0, count=30, size=1)
        for unit in units:
            await asyncio.wait_for(unit.done.wait(), 10)
            assert isinstance(unit.ends[0], int)
        assert isinstance(none.ends[0], LogUnavailable)
        check(world, [one])
        await one.sequencer.aclose()

    run(main())


def test_what_a_server_does_not_take_any_more_goes_in_parts_and_stops_nobody() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world)
        one.log.shrink()
        first = one.add("a", 0, size=3000)
        await asyncio.wait_for(first.done.wait(), 60)
        assert isinstance(first.ends[0], AppendUnknown)  # its writer now looks whether it is stored
        units = [one.add("a", 0, size=3000), one.add("b", 0), one.add("c", 0, size=1500), one.add("d", 0, size=1500)]
        for unit in units:
            await asyncio.wait_for(unit.done.wait(), 10)
            assert isinstance(unit.ends[0], int)
        check(world, [one])
        await one.sequencer.aclose()

    run(main())


def test_what_waits_while_the_server_comes_to_take_less_goes_in_parts() -> None:
    async def main() -> None:
        world = World(random.Random(1), ["slow"])
        (one,) = await started(world)
        one.add("a", 0)
        await asyncio.sleep(0.1)
        waiting = one.add("b", 0, size=3000)
        one.log.message_bytes_max = 2048  # a new connection learns of it
        await asyncio.wait_for(waiting.done.wait(), 10)
        assert isinstance(waiting.ends[0], int)
        check(world, [one])
        await one.sequencer.aclose()

    run(main())


def test_what_names_parts_goes_into_no_parts_again_when_the_server_comes_to_take_less() -> None:
    """The references to parts would be taken for the entries."""

    async def main() -> None:
        world = World(random.Random(1), ["slow"])
        (one,) = await started(world, message_bytes_max=8192)
        one.add("a", 0)
        await asyncio.sleep(0.1)
        world.faults = []  # parts are stored while that unit is on its way
        large = one.add("b", 0, count=4, size=2500)
        await asyncio.sleep(0.1)
        assert [bool(queued.elsewhere) for queued in one.sequencer._waiting] == [True]
        one.log.message_bytes_max = 2048  # a new connection learns of it
        await asyncio.wait_for(large.done.wait(), 60)
        assert isinstance(large.ends[0], LogUnavailable)
        check(world, [one])
        await one.sequencer.aclose()

    run(main())


def test_a_group_that_was_stored_before_the_server_came_to_take_less_is_found() -> None:
    async def main() -> None:
        world = World(random.Random(1), ["stored"])
        (one,) = await started(world)
        first_behind, looks = one.tail.first_behind, 0

        async def behind(seq: int) -> Any:
            nonlocal looks
            looks += 1
            one.log.message_bytes_max = 2048
            if looks == 1:
                raise LogUnavailable("not connected yet")
            return await first_behind(seq)

        one.tail.first_behind = behind  # type: ignore[method-assign]
        unit = one.add("a", 0, size=3000)
        await asyncio.wait_for(unit.done.wait(), 10)
        assert unit.ends == [place(1, 0)]
        assert looks == 2
        check(world, [one])
        await one.sequencer.aclose()

    run(main())


def test_a_large_unit_is_dropped_before_its_parts_go_out_and_not_later() -> None:
    """A caller that gives up later is told that the unit may be stored; when it looks, the unit is there."""

    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world, message_bytes_max=8192)
        begun, waiting = one.add("a", 0, size=9**5), one.add("b", 0, size=9**5)
        waiting.gone = True
        while not any(m.subject == SUBJECTS.parts for m in world.stream.messages):  # noqa: ASYNC110
            await asyncio.sleep(0)
        begun.gone = True
        for unit in (begun, waiting):
            await asyncio.wait_for(unit.done.wait(), 10)
        assert isinstance(begun.ends[0], int)
        assert isinstance(waiting.ends[0], Conflict)
        check(world, [one])
        await one.sequencer.aclose()

    run(main())


def test_a_large_unit_whose_parts_meet_an_unexpected_error_ends_and_the_next_one_is_stored() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world, message_bytes_max=8192)
        publish = one.log.publish

        async def odd(message: Outgoing, timeout_s: float) -> int:
            one.log.publish = publish  # type: ignore[method-assign]
            raise ValueError("not one of ours")

        one.log.publish = odd  # type: ignore[method-assign]
        units = [one.add("a", 0, size=9**5), one.add("b", 0, size=9**5)]
        for unit in units:
            await asyncio.wait_for(unit.done.wait(), 10)
        assert isinstance(units[0].ends[0], AppendUnknown)
        assert isinstance(units[1].ends[0], int)
        check(world, [one])
        await one.sequencer.aclose()

    run(main())


def test_a_unit_of_too_many_entries_is_refused() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world, message_bytes_max=1 << 20)
        most, more = one.add("a", 0, count=ENTRIES_MAX), one.add("b", 0, count=ENTRIES_MAX + 1)
        for unit in (most, more):
            await asyncio.wait_for(unit.done.wait(), 10)
        assert most.ends == [place(1, ENTRIES_MAX - 1)]
        assert isinstance(more.ends[0], LogUnavailable)
        check(world, [one])
        await one.sequencer.aclose()

    run(main())


def test_a_group_does_not_go_out_when_its_parts_may_be_purged() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world)
        first = one.add("a", 0, size=9000)
        one.log.lose_groups = True
        await asyncio.sleep(2 * _PARTS_LAST_S)
        assert isinstance(first.ends[0], (AppendUnknown, LogUnavailable))
        one.log.lose_groups = False
        second = one.add("b", 0)
        await asyncio.wait_for(second.done.wait(), 10)
        check(world, [one])
        assert len(world.groups()) == 1
        await one.sequencer.aclose()

    run(main())


def test_a_group_does_not_go_out_when_its_parts_were_purged_while_the_machine_was_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No gap shows the purge: the parts stood between the last group that was seen and the next one."""
    asleep = 0.0
    monkeypatch.setattr(elapsed, "suspended_s", lambda: asleep)

    async def main() -> None:
        world = World(random.Random(1))
        one, two = await started(world, 2)
        known = one.add("a", 0)
        await asyncio.wait_for(known.done.wait(), 10)
        publish = one.log.publish

        async def suspended(message: Outgoing, timeout_s: float) -> int:
            nonlocal asleep
            if message.subject == SUBJECTS.groups:
                one.log.publish = publish  # type: ignore[method-assign]
                asleep += 2 * _PARTS_LAST_S
                behind = two.add("c", 0)
                await asyncio.wait_for(behind.done.wait(), 10)
                world.stream.purge(world.groups()[-1][0].seq)
            return await publish(message, timeout_s)

        one.log.publish = suspended  # type: ignore[method-assign]
        large = one.add("b", 0, size=9000)
        await asyncio.wait_for(large.done.wait(), 10)
        assert isinstance(large.ends[0], LogUnavailable)
        assert [thread_id for _, thread_id, _, _ in world.entries()] == ["c"]
        for process in (one, two):
            await process.sequencer.aclose()

    run(main())


def test_a_group_is_not_sent_again_after_its_parts_may_be_purged_while_nobody_could_look() -> None:
    """A link that is cut when the group goes out, and back when its parts have gone."""

    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world)
        known = one.add("a", 0)
        await asyncio.wait_for(known.done.wait(), 10)
        publish, first_behind, back_at = one.log.publish, one.tail.first_behind, float("inf")

        async def cut(message: Outgoing, timeout_s: float) -> int:
            nonlocal back_at
            if message.subject == SUBJECTS.groups and back_at == float("inf"):
                back_at = elapsed.now_s() + 2 * _PARTS_LAST_S
            if elapsed.now_s() < back_at < float("inf"):
                raise AppendUnknown("cut")
            return await publish(message, timeout_s)

        async def behind(seq: int) -> Any:
            if elapsed.now_s() < back_at + 0.5:  # once more than the group, as chance has it
                raise LogUnavailable("cut")
            return await first_behind(seq)

        one.log.publish, one.tail.first_behind = cut, behind  # type: ignore[method-assign]
        large = one.add("b", 0, size=9000)
        await asyncio.wait_for(large.done.wait(), 3 * _PARTS_LAST_S)
        assert isinstance(large.ends[0], AppendUnknown)
        assert [thread_id for _, thread_id, _, _ in world.entries()] == ["a"]
        await one.sequencer.aclose()

    run(main())


def test_nothing_is_forgotten_that_a_large_unit_behind_younger_ones_was_drafted_on() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world)
        publish, go_on = one.log.publish, asyncio.Event()

        async def slow_parts(message: Outgoing, timeout_s: float) -> int:
            if message.subject == SUBJECTS.parts:
                await go_on.wait()
            return await publish(message, timeout_s)

        one.log.publish = slow_parts  # type: ignore[method-assign]
        seen = one.heads.seen
        large, first = one.add("a", 0, size=9000), one.add("b", 0)
        await asyncio.wait_for(first.done.wait(), 10)
        assert one.heads.seen > seen
        assert one.sequencer.oldest == seen
        one.log.lose_groups = True
        on_its_way = one.add("c", 0)
        await asyncio.sleep(0.1)
        behind = one.add("d", 0)
        go_on.set()
        await asyncio.sleep(0.1)
        assert one.sequencer.oldest == seen
        one.log.lose_groups = False
        for unit in (large, on_its_way, behind):
            await asyncio.wait_for(unit.done.wait(), 10)
        assert one.sequencer.oldest is None
        check(world, [one])
        await one.sequencer.aclose()

    run(main())


def test_what_is_purged_is_told_to_every_writer() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        one, two = await started(world, 2)
        first = one.add("a", 0)
        await asyncio.wait_for(first.done.wait(), 5)
        await two.tail.see_all()
        two.heads.forget(place(9, 0))
        assert two.heads.admits(hash_of("a"), place(1, 0))
        await one.sequencer.fence(place(1, 1))
        count = len(world.groups())
        await one.sequencer.fence(place(1, 1))  # the second call writes nothing
        assert len(world.groups()) == count
        unit = two.add("a", place(1, 0))
        await asyncio.wait_for(unit.done.wait(), 5)
        assert isinstance(unit.ends[0], Conflict)
        for process in (one, two):
            await process.sequencer.aclose()

    run(main())


def test_what_was_looked_up_before_all_began_anew_is_looked_up_again() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world)
        first = one.add("a", 0)
        await asyncio.wait_for(first.done.wait(), 5)
        queued = Queued(
            one.unit("b", 0), one.heads.seen, one.heads.life, [Outgoing(SUBJECTS.of("b"), b"", "1.h", 0)], 100
        )
        assert choose([queued], one.heads, SUBJECTS).units == [queued]
        one.heads.start(0, one.heads.seen, one.heads.seen_id)
        assert choose([queued], one.heads, SUBJECTS).moved == [queued]
        await one.sequencer.aclose()

    run(main())


def test_of_two_units_of_a_thread_that_expect_the_same_one_is_chosen() -> None:
    heads = Heads()
    heads.start(0, 0, 0)
    units = [Queued(AppendUnit([]), 0, 1, [Outgoing(SUBJECTS.of("a"), b"", "1.h", 0)], 100) for _ in range(2)]
    chosen = choose(units, heads, SUBJECTS)
    assert (chosen.units, chosen.moved) == (units[:1], units[1:])


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 3000)), min_size=1, max_size=40), st.integers(9000, 300000)
)
def test_as_many_units_go_together_as_fit(sizes: list[tuple[int, int]], room: int) -> None:
    units = [
        Queued(
            AppendUnit([]),
            0,
            1,
            [message := Outgoing(SUBJECTS.of("a"), b"x" * size, "1.h")] * count,
            count * size_of(message),
        )
        for count, size in sizes
    ]
    count = count_fitting(units, room)
    assert 1 <= count <= len(units)
    taken = [m for unit in units[:count] for m in unit.messages]
    if count > 1:
        assert len(taken) <= ENTRIES_MAX
        assert sum(len(m.body) for m in taken) < room


@pytest.mark.parametrize("error", [LogFull("full"), LogUnavailable("no leader")])
def test_what_is_refused_is_told_to_all_of_the_group(error: Exception) -> None:
    async def main() -> None:
        world = World(random.Random(1), ["full" if isinstance(error, LogFull) else "unavailable"])
        (one,) = await started(world)
        units = [one.add("a", 0), one.add("b", 0)]
        for unit in units:
            await asyncio.wait_for(unit.done.wait(), 5)
        assert all(isinstance(unit.ends[0], type(error)) for unit in units)
        check(world, [one])
        await one.sequencer.aclose()

    run(main())


class Link(Faulty):
    """A process on a link that carries `bytes_per_s`."""

    def __init__(self, world: World, bytes_per_s: int) -> None:
        super().__init__(world, 1 << 20)
        self.bytes_per_s = bytes_per_s

    async def part(self, subject: str, seq: int, timeout_s: float, limit: int, bytes_max: int = 0) -> Part:
        found, more = await super().part(subject, seq, timeout_s, limit, bytes_max)
        came, took_s = 0, 0.0
        while came < len(found) and took_s + len(found[came].body) / self.bytes_per_s < timeout_s:
            took_s += len(found[came].body) / self.bytes_per_s
            came += 1
        await asyncio.sleep(took_s if came == len(found) else timeout_s)
        if found and not came:
            raise LogUnavailable("nothing came in time")
        return Part(found[:came], more + len(found) - came)


@pytest.mark.parametrize("way_s", [0.15, *seldom(0.04)])
def test_who_reads_more_slowly_than_another_writes_sees_what_was_there_when_it_asked(way_s: float) -> None:
    async def main() -> None:
        world, loop = World(random.Random(1)), asyncio.get_running_loop()
        near, far = Process(world, log=Away(world, 0.0005)), Process(world, log=Away(world, way_s))
        for process in (near, far):
            await process.tail.see_all()
            process.sequencer.start()

        async def writer() -> None:
            at = 0
            while loop.time() < 5:
                unit = near.add("a", at)
                await unit.done.wait()
                (end,) = unit.ends
                assert isinstance(end, int)
                at = end
                near.units.clear()

        writing = asyncio.create_task(writer())
        await asyncio.sleep(2)
        for _ in range(3):
            began, end = loop.time(), world.stream.end
            await far.tail.see_all()
            assert far.heads.seen >= end
            assert loop.time() - began < 8 * way_s
        assert near.sequencer.groups > 1500, "many times what came with one answer"
        await writing
        await near.sequencer.aclose()
        await far.sequencer.aclose()

    run(main())


@pytest.mark.parametrize("bytes_per_s", [50 << 10, 2 << 20, 200 << 20])
def test_what_came_over_a_slow_link_stays(bytes_per_s: int) -> None:
    """Regression: each read asked for more than could come in time, and all that had come was thrown away."""

    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world, message_bytes_max=1 << 20)
        for n in range(64):
            unit = one.add(f"t{n}", 0, size=230 << 10)
            await unit.done.wait()
        await one.sequencer.aclose()
        far = Process(world, log=Link(world, bytes_per_s))
        began = asyncio.get_running_loop().time()
        await far.tail.see_all()
        assert far.heads.seen == one.heads.seen
        needs_s = (64 * 230 << 10) / bytes_per_s
        assert asyncio.get_running_loop().time() - began < 1.2 * needs_s + 5

    run(main())


def test_what_is_only_heard_and_is_no_group_is_ignored_quietly(caplog: pytest.LogCaptureFixture) -> None:
    """Any process may tell anything, also one of a later release."""

    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world)
        for header in ("", "G2.0.x", "G1.0.x"):
            assert one.tail.hear(7, header, 10, None) is None
            assert one.tail.hear(7, header, 10, b"and a body") is None
        assert one.heads.seen == 0
        await one.sequencer.aclose()

    run(main())
    assert not caplog.records


def test_a_unit_that_failed_is_not_kept() -> None:
    """The error refers to frames, and they to the unit: a cycle, which the garbage collector must see."""

    ended = asyncio.Event()

    class Kept(AppendUnit, weakref=True, eq=False):
        outcome: object = None

        def ended(self, outcome: object) -> None:
            self.outcome = outcome
            ended.set()

    async def main() -> None:
        process = Process(World(random.Random(1)))

        async def unavailable() -> None:
            raise LogUnavailable("it cannot be looked at")

        process.tail.see_all = unavailable
        process.sequencer.start()
        unit: Any = Kept(process.unit("a", 0).messages)
        ref = weakref.ref(unit)
        process.sequencer.add(unit)
        await asyncio.wait_for(ended.wait(), 5)
        assert isinstance(unit.outcome, LogUnavailable)
        del unit
        gc.collect()
        assert ref() is None
        await process.sequencer.aclose()

    run(main())


def test_writes_without_an_answer_are_said_to_be_so_until_there_is_one() -> None:
    """A server with a full disk does this. One lost connection, or a server that is away, is not reported."""

    async def main() -> None:
        world = World(random.Random(0))
        (one,) = await started(world)
        one.log.lose_groups = True
        unit = one.add("a", 0)
        await asyncio.sleep(_TIMEOUT_S + 1)
        assert one.sequencer.trouble == "", "it was sent once"
        await asyncio.sleep(_TIMEOUT_S)
        assert "does not answer writes" in one.sequencer.trouble
        one.log.lose_groups = False
        await unit.done.wait()
        assert isinstance(unit.ends[0], int)
        await asyncio.sleep(0)
        assert one.sequencer.trouble == ""
        world.faults = ("unavailable",)
        await one.add("b", 0).done.wait()
        assert one.sequencer.trouble == ""
        await one.sequencer.aclose()

    run(main())


def test_the_same_of_the_parts_of_large_entries() -> None:
    async def main() -> None:
        world = World(random.Random(0))
        (one,) = await started(world, message_bytes_max=8192)
        world.faults = ("lost",)
        for expected in (False, True):
            unit = one.add("a", 0, size=60_000)
            await unit.done.wait()
            assert isinstance(unit.ends[0], LogUnavailable)
            assert ("does not answer writes" in one.sequencer.trouble) is expected
        world.faults = ()
        unit = one.add("a", 0, size=60_000)
        await unit.done.wait()
        assert isinstance(unit.ends[0], int)
        assert one.sequencer.trouble == ""
        await one.sequencer.aclose()

    run(main())
