"""What is purged from the stream once owners no longer need it: groups, and the parts of large entries."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.groups.group import decode_header
from bufstore.buffer.groups.log import GroupLog
from bufstore.buffer.places import first_place
from bufstore.buffer.ports.log import Floor
from bufstore.jetstream.messages import Outgoing
from thorough import examples
from unit.fake_log import run
from unit.group_server import SUBJECTS, GroupServer
from unit.write_world import Instance, World


class Replicas(GroupServer):
    may_lag = True


async def let_go(log: GroupLog, settled: int, below: int) -> None:
    """Let all owners say that all groups below `settled` are settled, and that those below `below` may go."""
    floor = Floor(first_place(settled), first_place(below))
    await log.let_go(dict.fromkeys(range(SUBJECTS.partitions), floor))


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.data())
@examples(30)
def test_a_process_that_begins_late_purges_all_but_what_the_groups_that_stay_need(
    large: Sequence[bool], data: st.DataObject
) -> None:
    """The process has not seen which parts belong to groups from before it began."""

    async def main() -> None:
        world = World(GroupServer(4096))
        one = Instance(world)
        log = world.log.open(world.config)
        begins = data.draw(st.integers(0, len(large) - 1))
        settled = 1
        for n, is_large in enumerate(large):
            await one.checkpoint(["x" * 9000 if is_large else n], f"thread {n}")
            if n == begins:
                settled = data.draw(st.integers(1, world.log.stream.end + 1))
                await let_go(log, settled, 1)
        stream = world.log.stream
        groups = [decode_header(m) for m in stream.messages if m.subject == SUBJECTS.groups]
        for below in sorted(data.draw(st.lists(st.integers(1, groups[-1].seq), min_size=1, max_size=3))):
            await let_go(log, max(settled, below), below)
            parts = [group.parts for group in groups if group.seq >= below and group.parts]
            assert stream.messages[0].seq == min(m.seq for m in stream.messages if m.seq >= min([below, *parts]))
        await one.aclose()
        await log.aclose()

    run(main())


@given(st.booleans(), st.booleans())
@examples(4)
def test_a_process_that_only_flushes_reads_the_groups_only_to_find_parts_that_they_need(
    large: bool, replicated: bool
) -> None:
    async def main() -> None:
        world = World((Replicas if replicated else GroupServer)(4096))
        one = Instance(world)
        log = world.log.open(world.config)
        for n in range(6):
            await one.checkpoint(["x" * 9000 if large and n == 1 else n], f"thread {n}")
        groups = [m.seq for m in world.log.stream.messages if m.subject == SUBJECTS.groups]
        await let_go(log, groups[4], groups[4])
        assert world.log.stream.messages[0].seq == groups[4]
        assert (log._heads.seen == 0) is not (large or replicated)
        await one.aclose()
        await log.aclose()

    run(main())


def test_parts_that_came_to_nothing_get_a_group_behind_them(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: nothing behind the last group is purged; parts there filled the log, and no group fitted any more."""

    async def main() -> None:
        world = World(GroupServer(4096))
        one = Instance(world)
        log, stream = world.log.open(world.config), world.log.stream

        async def groups_after_a_look(reached: int, *, purge: bool = False) -> list[int]:
            below = first_place(reached) if purge else 0
            await log.let_go(dict.fromkeys(range(SUBJECTS.partitions), Floor(below, below)), first_place(reached))
            return [m.seq for m in stream.messages if m.subject == SUBJECTS.groups]

        def leave_parts() -> None:
            stream.store([Outgoing(SUBJECTS.parts, b"x" * 3000)] * 2)

        assert await groups_after_a_look(0) == []
        leave_parts()  # in a log that has never had a group
        assert await groups_after_a_look(0) == []  # their group may still be on its way
        for _ in range(3):
            assert await groups_after_a_look(0) == [3]
        await one.checkpoint(["x" * 9000])
        large = stream.end
        leave_parts()
        for _ in range(3):  # entries that are not flushed stay anyway
            assert await groups_after_a_look(3) == [3, large]
        assert await groups_after_a_look(large) == [3, large]
        for _ in range(3):
            assert await groups_after_a_look(large) == [3, large, large + 3]
        assert await world.messages() == ["x" * 9000]
        # There may be others' parts between the last group and its own parts.
        await one.checkpoint(["x" * 9000], "another")
        last = stream.end
        assert await groups_after_a_look(last, purge=True) == [last, last + 1]
        assert stream.messages[0].subject == SUBJECTS.parts
        for _ in range(3):
            assert await groups_after_a_look(last + 1, purge=True) == [last + 1]
        assert len(stream.messages) == 1
        await one.aclose()
        leave_parts()
        await groups_after_a_look(last + 1)
        await log.aclose()
        await groups_after_a_look(last + 1)  # it closes; the next process that opens the log does it
        assert not [r for r in caplog.records if r.levelname == "WARNING"]

    run(main())
