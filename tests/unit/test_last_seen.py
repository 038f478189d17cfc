"""Groups that were seen and are no longer in the log: they were removed, never stored, or the log went back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.groups import last_seen
from bufstore.buffer.groups.group import Draft, hash_of
from bufstore.buffer.groups.last_seen import Seen, Standing, id_of, standing
from bufstore.buffer.groups.others import _HAS_STORED, _STORED
from bufstore.buffer.places import group_of, place
from bufstore.buffer.subjects import first_sequence
from bufstore.errors import LogRolledBack, LogUnavailable, StoreUnavailable
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, Part, StoredMessage
from bufstore.memory.log import MemoryStream
from unit.fake_log import run
from unit.test_group_sequencer import CONFIG, SUBJECTS, Process, World, check, started


async def wrote(process: Process, thread_id: str = "a", expected: int | None = None) -> int | Exception:
    unit = process.add(thread_id, expected)
    await asyncio.wait_for(unit.done.wait(), 5)
    return unit.ends[0]


async def goes_on(process: Process, world: World) -> None:
    """Check that the process writes and reads, though it may first have to look again."""
    expected = process.heads.head(hash_of("b"))
    for _ in range(2):
        if isinstance(at := await wrote(process, "b", expected), int):
            break
        assert isinstance(at, Conflict)
        await asyncio.wait_for(process.tail.see_all(), 5)
        expected = process.heads.head(hash_of("b"))
    else:
        raise AssertionError("it writes no more")
    assert process.heads.seen == world.stream.last_of(SUBJECTS.groups)
    assert world.entries()[-1][:2] == (at, "b")


def two_writers(main: Callable[[World, Process, Process], Awaitable[None]]) -> None:
    """Run `main` with two writers that got in each other's way, so that they tell each other of their groups."""

    async def whole() -> None:
        world = World(random.Random(1))
        one, two = await started(world, 2)
        for _ in range(3):
            for process in (one, two):
                assert isinstance(await wrote(process), int)
        await main(world, one, two)
        for process in (one, two):
            await process.sequencer.aclose()

    run(whole())


async def tell(process: Process, seq: int, before: Seen) -> None:
    """Tell writers of a group that the log need not have."""
    words = Draft(5, []).header(before.id, before.seq, 0).encode()
    await tell_words(process, _STORED.pack(_HAS_STORED, 99, 0, 0, seq, 0) + words)


async def tell_words(process: Process, words: bytes) -> None:
    """Tell all writers these words."""
    await process.log.tell(SUBJECTS.writers, words)


def lose_last(world: World) -> None:
    """Let the server come back without its last message."""
    world.stream.remove(world.stream.end)
    world.stream.end -= 1


def connect_again(*processes: Process) -> None:
    for process in processes:
        process.log.connections += 1


def test_writers_go_on_when_the_stream_was_purged_by_hand() -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        world.stream.purge(world.stream.end + 1)
        for process in (one, two):
            await goes_on(process, world)

    two_writers(main)


@pytest.mark.parametrize("read", [False, True])
def test_writers_go_on_when_the_last_message_was_removed(read: bool) -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        if read:
            for process in (one, two):
                await process.tail.see_all()
        world.stream.store([Outgoing(SUBJECTS.parts, b"something behind")])
        world.stream.remove(world.stream.last_of(SUBJECTS.groups))
        for process in (one, two):
            await goes_on(process, world)

    two_writers(main)


def test_writers_go_on_in_the_next_generation_of_the_log() -> None:
    """Nothing of it was flushed as far as the cursors say: the repair has applied or parked what the log had."""

    async def main(world: World, one: Process, two: Process) -> None:
        flushed_to(one, two, seq=0)
        world.stream = MemoryStream(CONFIG.log, epoch=1)
        for process in (one, two):
            process.log._streams[CONFIG.log.stream] = world.stream
        for process in (one, two):
            await goes_on(process, world)
        assert world.stream.messages[0].seq == first_sequence(1)
        check(world, [])

    two_writers(main)


@pytest.mark.parametrize("ahead", [1, 2, 1000])
def test_a_group_that_was_told_of_and_is_not_in_the_log_stops_nobody(ahead: int) -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        seen = Seen(two.heads.seen, two.heads.seen_id)
        await tell(one, seen.seq + ahead, seen)
        assert two.heads.seen == seen.seq + ahead
        for process in (one, two):
            await goes_on(process, world)
            # In this virtual time the other hears of the true group. A writer that is told a lie about the next group,
            # and writes before it hears the truth, builds on a group that it does not know (SECURITY.md).
            await asyncio.sleep(0.1)
        check(world, [one, two])

    two_writers(main)


def test_reads_miss_nothing_because_of_what_was_told() -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        await tell(one, world.stream.end + 1000, Seen(two.heads.seen, two.heads.seen_id))
        at = place(world.stream.end + 1, 0)
        draft = Draft(77, [])
        last = [g for g, _ in world.groups()][-1]
        world.stream.store([Outgoing(SUBJECTS.groups, draft.body, draft.header(last.id, last.seq, 0))])
        await two.tail.see_all()
        assert two.heads.seen == at >> 10
        assert two.heads.seen_id == 77

    two_writers(main)


def test_who_told_something_wrong_is_not_believed_again_at_once() -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        for _ in range(20):
            await tell(one, two.heads.seen + 1000, Seen(two.heads.seen, two.heads.seen_id))
            await two.tail.see_all()
            assert two.heads.seen == world.stream.end
        assert two.heads.life <= 3
        await asyncio.sleep(11)
        assert two.tail.last_seen.listens

    two_writers(main)


def lose_end(world: World, count: int) -> int:
    """Let the server lose its last messages, and go on behind them, as behind a damaged file. Returns what is left."""
    for seq in range(world.stream.end - count + 1, world.stream.end + 1):
        world.stream.remove(seq)
    return world.stream.last_of(SUBJECTS.groups)


def flushed_to(*processes: Process, seq: int) -> None:
    """Let Postgres say that everything is flushed up to the group with this sequence."""

    async def flushed(places: Mapping[int, int], seen: int) -> bool:
        assert all(at <= seen for at in places.values())
        return all(group_of(at) <= seq for at in places.values())

    for process in processes:
        process.tail.flushed = flushed


@pytest.mark.parametrize("behind", ["", "group", "foreign"])
@pytest.mark.parametrize("count", [0, 1, 3, 6])
def test_what_is_left_of_a_lost_end_is_told_by_the_last_group_or_the_one_behind(count: int, behind: str) -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        await one.tail.see_all()
        seen = one.tail.last_seen.certain
        assert seen.seq == world.stream.end
        left = lose_end(world, count)
        if behind == "foreign":
            world.stream.store([Outgoing(SUBJECTS.groups, b"", "nothing of ours")])
        if behind == "group":
            three = Process(world)
            three.sequencer.start()
            assert isinstance(await wrote(three, "c"), int)
            await three.sequencer.aclose()
        # What is not ours says nothing of what it stands behind.
        assert await what_is_left(one, seen) == (seen.seq if behind == "foreign" else left)

    two_writers(main)


async def what_is_left(process: Process, seen: Seen) -> int:
    return await last_seen.holds_up_to(process.log, SUBJECTS.groups, seen, 5.0)


def test_a_replica_that_lags_says_nothing_of_a_lost_end() -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        seen = one.tail.last_seen.certain
        assert isinstance(await wrote(two, "b"), int)
        world.stream.remove(seen.seq)

        async def part(*_: object, **__: object) -> Part:
            return Part([], 0)

        one.log.part = part  # type: ignore[method-assign]
        with pytest.raises(LogUnavailable, match="does not show yet"):
            await what_is_left(one, seen)

    two_writers(main)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_log_that_lost_its_end_is_refused_unless_all_of_it_was_flushed(
    elsewhere: bool, read: bool, heard: bool, missing: int
) -> None:
    """The server says that nothing is gone: it goes on behind what is missing. `missing`: how much was not flushed."""

    async def main(world: World, one: Process, two: Process) -> None:
        for process in (one, two):
            await process.tail.see_all()
            flushed_to(process, seq=world.stream.end - missing)
        if heard:
            flushed_to(one, two, seq=world.stream.end - missing + 1)
            assert isinstance(await wrote(one), int)
            await asyncio.sleep(0.1)  # in virtual time: `two` is told of the group
            assert two.tail.last_seen.only_heard
        end = lose_end(world, 4)
        if elsewhere:  # another writer, which knows nothing of what is gone, was faster
            three = Process(world)
            three.sequencer.start()
            assert isinstance(await wrote(three, "c"), int)
            await three.sequencer.aclose()
            end = world.stream.end
        connect_again(one, two)
        if read:
            for process in (one, two):
                with suppress(LogRolledBack):
                    await process.tail.see_all()
        for process in (one, two):
            if missing > (heard and process is two):  # what was only told of does not count
                assert isinstance(await wrote(process, "b", 0), LogRolledBack)
                assert process.log.refused is not None
                assert "lost its end" in process.log.refused.reason
                assert world.stream.last_of(SUBJECTS.groups) == end
        if not missing:
            for process in (one, two):
                await goes_on(process, world)

    two_writers(main)


def test_while_postgres_cannot_say_whether_the_logs_end_was_flushed_nothing_is_written() -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        async def away(places: Mapping[int, int], seen: int) -> bool:
            raise StoreUnavailable("it is away")

        one.tail.flushed = away
        end = lose_end(world, 2)
        connect_again(one)
        error = await wrote(one)
        assert isinstance(error, LogUnavailable)
        assert "Postgres must say" in str(error)
        assert world.stream.last_of(SUBJECTS.groups) == end
        flushed_to(one, seq=world.stream.end)
        await goes_on(one, world)

    two_writers(main)


def test_a_postgres_that_is_silent_about_the_logs_end_is_not_waited_for() -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        async def silent(places: Mapping[int, int], seen: int) -> bool:
            await asyncio.sleep(3600)
            return True

        one.tail.flushed = silent
        lose_end(world, 2)
        connect_again(one)
        assert isinstance(await wrote(one), LogUnavailable)

    two_writers(main)


def test_who_has_only_seen_what_the_log_lost_goes_on_once_the_log_is_accepted_again() -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        await two.tail.see_all()
        flushed_to(two, seq=0)
        lose_end(world, 3)
        connect_again(two)
        assert isinstance(await wrote(two), LogRolledBack)
        two.log._refused = None
        await goes_on(two, world)

    two_writers(main)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_group_that_was_only_told_of_and_lost_is_dropped_and_its_writer_refuses_the_log(elsewhere: bool) -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        await two.tail.see_all()
        assert isinstance(await wrote(one), int)
        await asyncio.sleep(0.1)  # in virtual time: it is told of the group
        assert two.tail.last_seen.only_heard
        lose_last(world)
        if elsewhere:  # another writer was faster
            three = Process(world)
            three.sequencer.start()
            assert isinstance(await wrote(three, "c"), int)
            await three.sequencer.aclose()
        connect_again(one, two)
        await goes_on(two, world)
        assert isinstance(await wrote(one), LogRolledBack)
        check(world, [])

    two_writers(main)


@pytest.mark.parametrize("more", [0, 1, 3])
@pytest.mark.parametrize("looked", [False, True])
def test_a_log_that_went_back_and_grew_again_is_refused_before_anything_is_sent(more: int, looked: bool) -> None:
    """The log is also refused when its present content was looked at before."""

    async def main() -> None:
        world = World(random.Random(1))
        one, two = await started(world, 2)
        first = await wrote(one, "a", 0)
        await two.tail.see_all()
        second = await wrote(one, "a", first)  # type: ignore[arg-type]
        lose_last(world)
        for _ in range(1 + more):
            assert isinstance(await wrote(two, "b"), int)
        connect_again(one)
        if looked:
            await one.tail.see_all()
        before = list(world.stream.messages)
        assert isinstance(await wrote(one, "a", second), (LogRolledBack, Conflict))  # type: ignore[arg-type]
        assert isinstance(await wrote(one, "c"), LogRolledBack)
        assert world.stream.messages == before
        assert one.log.refused is not None, "what it shows is not read either"
        one.log._refused = None
        assert await one.tail.last_seen.mismatch(), "it is not taken again as it is"
        for process in (one, two):
            await process.sequencer.aclose()

    run(main())


def test_it_is_asked_once_for_each_connection_and_never_else() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world)
        for _ in range(2):
            assert isinstance(await wrote(one), int)
        costs = []
        for connects in (False, True, False):
            if connects:
                connect_again(one)
            calls = one.log.calls
            assert isinstance(await wrote(one), int)
            costs.append(one.log.calls - calls)
        assert costs == [1, 2, 1]
        await one.sequencer.aclose()

    run(main())


def test_nothing_is_sent_while_nobody_can_tell_and_then_all_goes_on() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world)
        assert isinstance(await wrote(one), int)
        connect_again(one)
        world.away_until = asyncio.get_running_loop().time() + 1
        assert isinstance(await wrote(one), LogUnavailable)
        assert len(world.groups()) == 1
        await asyncio.sleep(2)
        assert isinstance(await wrote(one), int)
        await one.sequencer.aclose()

    run(main())


def test_what_was_purged_or_erased_behind_ones_back_is_no_loss() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        one, two = await started(world, 2)
        assert isinstance(await wrote(one), int)
        assert isinstance(await wrote(two), int)
        world.stream.remove(1)
        connect_again(one)
        assert isinstance(await wrote(one), int)
        assert isinstance(await wrote(two), int)
        assert isinstance(await wrote(two), int)
        world.stream.purge(world.stream.end)
        connect_again(one)
        assert isinstance(await wrote(one), int)
        for process in (one, two):
            await process.sequencer.aclose()

    run(main())


class Replicas:
    """Nodes that may answer for the log: each has a beginning of it. Only the last one stores anything."""

    connections = 1

    def __init__(self, ends: Sequence[int], answers: Callable[[int], int], removed: frozenset[int]) -> None:
        self.ends, self.answers, self.removed = ends, answers, removed
        self.proofs = 0

    def _node(self) -> int:
        return self.ends[self.answers(len(self.ends))]

    async def last(self, subjects: Sequence[str], timeout_s: float) -> dict[str, StoredMessage]:
        there = [seq for seq in range(1, self._node() + 1) if seq not in self.removed]
        return {subjects[0]: group_at(there[-1])} if there else {}

    async def identity(self, seq: int) -> StoredMessage | None:
        return group_at(seq) if seq <= self._node() and seq not in self.removed else None

    async def end(self, timeout_s: float) -> int:
        return self._node()

    async def barrier(self, timeout_s: float) -> int:
        if not self.answers(3):
            raise AppendUnknown("no answer")
        self.proofs += 1
        return self.ends[-1] + self.proofs

    async def fresh_end(self, timeout_s: float) -> int:
        return max((seq for seq in range(1, self.ends[-1] + 1) if seq not in self.removed), default=0)

    def refuse(self, reason: str) -> None:
        raise AssertionError


def group_at(seq: int, id_: int = 0) -> StoredMessage:
    return StoredMessage(SUBJECTS.groups, seq, Draft(id_ or seq, []).header(seq - 1, seq - 1, 0), b"")


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.integers(1, 7),
    st.frozensets(st.integers(1, 7)),
    st.randoms(use_true_random=False),
)
def test_nodes_that_lag_or_lead_no_more_make_nobody_refuse_a_log(
    ends: list[int], seq: int, removed: frozenset[int], chance: random.Random
) -> None:
    async def main() -> None:
        leader = max(ends)
        log = Replicas([*ends, leader], chance.randrange, removed)
        try:
            found = await standing(log, SUBJECTS.groups, Seen(seq, seq), 5.0)
        except LogUnavailable:
            return
        last = await log.fresh_end(5.0)
        assert (found is Standing.LOST) == (seq > leader)
        if found is Standing.PASSED:
            assert last > seq
        if found is Standing.REMOVED:
            assert seq in removed
            assert last < seq

    run(main())


def test_another_message_in_its_place_is_not_it() -> None:
    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world)
        world.stream.store([Outgoing(SUBJECTS.groups, b"", group_at(1, 8).header)])
        world.stream.store([Outgoing(SUBJECTS.proof, b"")])
        for seen, what in [
            (Seen(0, 0), Standing.THERE),
            (Seen(1, 8), Standing.THERE),
            (Seen(1, 9), Standing.LOST),
            (Seen(2, 9), Standing.LOST),
            (Seen(3, 9), Standing.LOST),
        ]:
            assert await standing(one.log, SUBJECTS.groups, seen, 5.0) is what
        assert id_of(world.stream.messages[1]) == 0
        await one.sequencer.aclose()

    run(main())
