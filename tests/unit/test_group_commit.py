"""Group commit: a unit is stored whole or not at all, its writer learns which, and no caller waits for ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.errors import Closed, LogFull, LogUnavailable
from bufstore.jetstream.errors import MessageTooLarge
from bufstore.jetstream.group_commit import GroupCommit
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing
from thorough import examples
from unit.fake_log import WRITE_FAULTS, FakeLog, run


def unit(subject: str, expected: int | None, *bodies: str) -> list[Outgoing]:
    return [Outgoing(subject, b.encode(), expected=expected if i == 0 else None) for i, b in enumerate(bodies)]


def started(log: FakeLog) -> GroupCommit:
    group = GroupCommit(log)  # type: ignore[arg-type]
    group.start()
    return group


async def outcomes(futures: Sequence[asyncio.Future[int]]) -> list[Any]:
    return await asyncio.gather(*futures, return_exceptions=True)


def bodies(log: FakeLog) -> list[str]:
    return [m.body.decode() for m in log.messages]


def test_one_write_is_a_plain_message_and_many_are_one_batch() -> None:
    async def main() -> None:
        log = FakeLog()
        group = started(log)
        assert await group.submit(unit("a", 0, "first")) == 1
        assert log.batches == []
        found = await outcomes([group.submit(unit(f"s{n}", 0, str(n))) for n in range(50)])
        assert found == list(range(2, 52))
        assert log.batches == [50]
        await group.aclose()

    run(main())


def test_each_unit_gets_the_sequence_of_its_own_last_message() -> None:
    async def main() -> None:
        log = FakeLog()
        group = started(log)
        units = [unit(f"s{n}", 0, *(f"{n}.{i}" for i in range(n % 4 + 1))) for n in range(20)]
        for seq, sent in zip(await outcomes([group.submit(u) for u in units]), units, strict=True):
            assert log.messages[seq - 1].body == sent[-1].body
        await group.aclose()

    run(main())


def test_a_unit_of_several_messages_is_never_sent_as_single_ones() -> None:
    async def main() -> None:
        log = FakeLog()
        log.fault = lambda kind: "refused"
        group = started(log)
        whole, *single = await outcomes([group.submit(unit("a", 0, "1", "2")), *(
            group.submit(unit(f"s{n}", 0, str(n))) for n in range(10)
        )])  # fmt: skip
        assert isinstance(whole, LogUnavailable)
        assert all(isinstance(seq, int) for seq in single), "a refused batch goes out as plain messages"
        assert sorted(bodies(log)) == sorted(map(str, range(10)))
        await group.aclose()

    run(main())


def test_a_moved_subject_fails_alone() -> None:
    async def main() -> None:
        log = FakeLog()
        log.store(unit("s3", None, "somebody else's"))
        group = started(log)
        found = await outcomes([group.submit(unit(f"s{n}", 0, str(n))) for n in range(12)])
        assert isinstance(found.pop(3), Conflict)
        assert all(isinstance(seq, int) for seq in found)
        assert log.batches == [12, 11]
        await group.aclose()

    run(main())


def test_two_units_of_one_subject_in_one_group_end_as_one_success_and_one_conflict() -> None:
    async def main() -> None:
        log = FakeLog()
        group = started(log)
        found = await outcomes([group.submit(unit("same", 0, str(n))) for n in range(8)])
        assert sum(isinstance(f, int) for f in found) == 1
        assert sum(isinstance(f, Conflict) for f in found) == 7
        assert len(log.messages) == 1
        await group.aclose()

    run(main())


@pytest.mark.parametrize("right", [0, 1])
def test_of_two_units_of_one_subject_only_that_fails_which_does_not_know_where_it_is(right: int) -> None:
    """Regression: which of their expectations was looked at, for both, was that of the last one."""

    async def main() -> None:
        log = FakeLog()
        log.store(unit("same", None, "somebody else's"))
        group = started(log)
        sent = [unit(f"s{n}", 0, str(n)) for n in range(10)]
        sent += [unit("same", 1 - right, "first"), unit("same", right, "second")]
        *others, first, second = await outcomes([group.submit(messages) for messages in sent])
        assert all(isinstance(outcome, int) for outcome in others)
        assert [type(first), type(second)] == ([int, Conflict] if right == 0 else [Conflict, int])
        await group.aclose()

    run(main())


def test_groups_stay_below_the_limits_of_a_batch() -> None:
    async def main() -> None:
        log = FakeLog()
        group = started(log)
        sent = [unit(f"s{n}", 0, *("x" * 10 for _ in range(300))) for n in range(9)]
        sent += [unit(f"big{n}", 0, "x" * (9 << 20)) for n in range(8)]
        await outcomes([group.submit(u) for u in sent])
        assert max(log.batches) <= 1000
        assert len(log.messages) == 9 * 300 + 8
        log.batches.clear()
        halves = ["x" * (3 << 19)] * 2
        await outcomes([group.submit(unit(f"s{n}", 0, *halves)) for n in range(100, 112)])
        assert 2 < max(log.batches) <= 10, "twelve would be more than 16 MiB"
        await group.aclose()

    run(main())


def test_a_cancelled_unit_that_was_not_sent_is_never_sent() -> None:
    async def main() -> None:
        log = FakeLog()
        group = started(log)
        first = group.submit(unit("a", 0, "first"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        second = group.submit(unit("b", 0, "second"))
        second.cancel()
        assert await first == 1
        assert await group.submit(unit("c", 0, "third")) == 2
        assert bodies(log) == ["first", "third"]
        await group.aclose()

    run(main())


def test_a_message_that_is_too_large_ends_no_other_of_its_group() -> None:
    """Regression: the server takes smaller messages than before, and whoever wrote meanwhile failed with it."""

    async def main() -> None:
        log = FakeLog()
        publish, publish_batch = log.publish, log.publish_batch

        def check(*messages: Outgoing) -> None:
            if any(len(message.body) > 100 for message in messages):
                raise MessageTooLarge("max_payload")

        async def checked(message: Outgoing, timeout_s: float) -> int:
            check(message)
            return await publish(message, timeout_s)

        async def batch_checked(messages: Sequence[Outgoing], timeout_s: float) -> int:
            check(*messages)
            return await publish_batch(messages, timeout_s)

        log.publish, log.publish_batch = checked, batch_checked  # type: ignore[method-assign]
        group = started(log)
        units = [unit(f"s{n}", 0, str(n)) for n in range(10)]
        units += [unit("large", 0, "x" * 101), unit("large of two", 0, "x", "x" * 101), unit("two", 0, "1", "2")]
        found = await outcomes([group.submit(sent) for sent in units])
        assert [type(outcome) for outcome in found] == [int] * 10 + [MessageTooLarge] * 2 + [int]
        await group.aclose()

    run(main())


@pytest.mark.parametrize("error", [ValueError("bug"), RuntimeError("bug"), KeyError("bug")])
def test_an_error_nobody_thought_of_fails_its_group_and_the_next_goes_on(error: Exception) -> None:
    async def main() -> None:
        log = FakeLog()
        broken = True

        def fault(kind: str) -> str:
            if broken and kind != "read":
                raise error
            return ""

        log.fault = fault
        group = started(log)
        found = await outcomes([group.submit(unit(f"s{n}", 0, "x")) for n in range(4)])
        found += await outcomes([group.submit(unit(f"s{n}", 0, "x")) for n in range(10)])
        assert all(isinstance(f, AppendUnknown) for f in found)
        broken = False
        assert await group.submit(unit("s", 0, "x")) == 1
        await group.aclose()

    run(main())


def test_a_group_that_is_cancelled_before_it_begins_holds_up_no_other() -> None:
    """Regression: what came later waited for it until the store was closed."""

    async def main() -> None:
        log = FakeLog()
        group = started(log)
        cancelled = group.submit(unit("a", 0, "x"))
        while not (tasks := [task for task in asyncio.all_tasks() if task.get_name() == "bufstore-group"]):  # noqa: ASYNC110
            await asyncio.sleep(0)
        tasks[0].cancel()
        later = group.submit(unit("b", 0, "y"))
        (outcome,) = await outcomes([cancelled])
        assert isinstance(outcome, LogUnavailable), "the store is open"
        assert "cancelled" in str(outcome)
        async with asyncio.timeout(5):
            assert await later == 1
        assert bodies(log) == ["y"]
        await group.aclose()

    run(main())


def test_of_many_half_goes_first_and_one_group_is_on_its_way_at_a_time() -> None:
    async def main() -> None:
        log = FakeLog()
        on_its_way = most = 0
        store = log.store

        async def slow(messages: Sequence[Outgoing], timeout_s: float, begun: object = None) -> int:
            nonlocal on_its_way, most
            on_its_way += 1
            most = max(most, on_its_way)
            log.batches.append(len(messages))
            await asyncio.sleep(0.01)
            on_its_way -= 1
            return store(messages)

        log.publish_batch = slow  # type: ignore[assignment]
        group = started(log)

        async def writer(who: int) -> None:
            for number in range(10):
                await group.submit(unit(f"{who}.{number}", 0, "x"))

        await asyncio.gather(*(writer(who) for who in range(200)))
        assert most == 1
        assert log.batches == [100] * 20, "two halves take turns: while one is stored the other one prepares"
        await group.aclose()

    run(main())


def test_what_waits_is_sent_before_the_writers_of_the_last_group_learn_of_its_end() -> None:
    async def main() -> None:
        log = FakeLog()
        order: list[str] = []
        publish_batch = log.publish_batch

        async def told(messages: Sequence[Outgoing], timeout_s: float) -> int:
            order.append(f"sent {messages[0].subject}")
            return await publish_batch(messages, timeout_s)

        log.publish_batch = told  # type: ignore[method-assign]
        group = started(log)
        first = [group.submit(unit(f"a{n}", 0, "x")) for n in range(10)]
        first[0].add_done_callback(lambda _: order.append("a0 is told"))
        while not order:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await outcomes([group.submit(unit(f"b{n}", 0, "x")) for n in range(10)])
        assert order == ["sent a0", "sent b0", "a0 is told"]
        await group.aclose()

    run(main())


def test_closing_ends_everybodys_waiting() -> None:
    async def main() -> None:
        log = FakeLog()
        log.fault = lambda kind: "slow"
        group = started(log)
        sent = group.submit(unit("a", 0, "on its way"))
        await asyncio.sleep(0.1)
        queued = [group.submit(unit(f"s{n}", 0, "queued")) for n in range(10)]
        await group.aclose()
        assert isinstance((await outcomes([sent]))[0], AppendUnknown)
        assert all(isinstance(f, Closed) for f in await outcomes(queued))
        late = group.submit(unit("late", 0, "x"))
        assert isinstance((await outcomes([late]))[0], Closed)

    run(main())


def test_closing_a_group_that_was_never_started_ends_everybodys_waiting() -> None:
    async def main() -> None:
        group = GroupCommit(FakeLog())  # type: ignore[arg-type]
        waiting = group.submit(unit("a", 0, "x"))
        await group.aclose()
        assert isinstance((await outcomes([waiting]))[0], Closed)

    run(main())


@examples(150)
@given(seed=st.integers(0, 2**32), share=st.floats(0, 1), kinds=st.sets(st.sampled_from(WRITE_FAULTS[1:-1])))
def test_whatever_fails_a_unit_is_stored_once_if_done_and_never_if_refused(
    seed: int, share: float, kinds: set[str]
) -> None:
    chance = random.Random(seed)

    async def main() -> None:
        log = FakeLog()
        log.fault = lambda kind: chance.choice(sorted(kinds)) if kinds and chance.random() < share else ""
        group = started(log)
        units: list[tuple[list[Outgoing], asyncio.Future[int]]] = []
        for n in range(chance.randint(1, 40)):
            sent = unit(f"s{chance.randrange(20)}", 0, *(f"{n}.{i}" for i in range(chance.choice([1, 1, 1, 3]))))
            units.append((sent, group.submit(sent)))
            if chance.random() < 0.2:
                await asyncio.sleep(0)
        found = await outcomes([future for _, future in units])
        log.fault = lambda kind: ""
        await log.end(1.0)
        stored = [m.body for m in log.messages]
        for (sent, _), outcome in zip(units, found, strict=True):
            times = stored.count(sent[0].body)
            assert stored.count(sent[-1].body) == times
            if isinstance(outcome, int):
                assert times == 1
                at = outcome - len(sent)
                assert stored[at : at + len(sent)] == [m.body for m in sent], "neighbours, in order"
            elif isinstance(outcome, AppendUnknown):
                assert times <= 1
            else:
                assert isinstance(outcome, (Conflict, LogFull, LogUnavailable))
                assert times == 0
        assert await group.submit(unit("afterwards", 0, "x")) == log.last_seq
        await group.aclose()

    run(main())


# --- lingering --------------------------------------------------------------------------------------------------


async def writes(group: GroupCommit, who: str, count: int, read_s: float) -> list[float]:
    """Write `count` times, after reading for `read_s` each time. Returns when each write was stored."""
    stored = []
    for n in range(count):
        await asyncio.sleep(read_s)
        await group.submit(unit(f"{who}.{n}", 0, f"{who}.{n}", "and its end"))
        stored.append(asyncio.get_running_loop().time())
    return stored


async def sizes(linger: float, read_s: Sequence[float], count: int = 10) -> list[int]:
    """The number of units in each group, from writers that read for `read_s`; a group takes 2 s."""
    log = FakeLog()
    log.fault = lambda kind: "slow"
    group = GroupCommit(log, linger=linger)  # type: ignore[arg-type]
    group.start()
    await asyncio.gather(*(writes(group, str(n), count, s) for n, s in enumerate(read_s)))
    await group.aclose()
    return [messages // 2 for messages in log.batches]


def test_writers_that_read_between_their_writes_share_groups_when_these_linger() -> None:
    async def main() -> None:
        read_s = [0.1 + 0.05 * n for n in range(8)]
        alternating = await sizes(0.0, read_s)
        together = await sizes(0.3, read_s)
        assert max(alternating[2:]) < 8
        assert together[2:-2] == [8] * len(together[2:-2])
        assert len(together) < len(alternating)

    run(main())


def test_a_lone_writer_never_lingers() -> None:
    async def main() -> None:
        log = FakeLog()
        log.fault = lambda kind: "slow"
        group = GroupCommit(log, linger=0.5)  # type: ignore[arg-type]
        group.start()
        assert await writes(group, "one", 5, 0.1) == pytest.approx([2.1 * (n + 1) for n in range(5)])
        await group.aclose()

    run(main())


def test_those_that_stay_away_are_waited_for_once_and_not_long() -> None:
    async def main() -> None:
        log = FakeLog()
        log.fault = lambda kind: "slow"
        group = GroupCommit(log, linger=0.5)  # type: ignore[arg-type]
        group.start()
        others = [asyncio.ensure_future(writes(group, f"o{n}", 1, 0.0)) for n in range(5)]
        one = await writes(group, "one", 4, 0.1)
        await asyncio.gather(*others)
        # The others' group ends at 2.0, and they are waited for until 3.0; after that, for nobody.
        assert one == pytest.approx([5.0, 7.1, 9.2, 11.3])
        await group.aclose()

    run(main())


def test_what_lingers_when_all_is_closed_learns_of_it() -> None:
    async def main() -> None:
        log = FakeLog()
        log.fault = lambda kind: "slow"
        group = GroupCommit(log, linger=1.0)  # type: ignore[arg-type]
        group.start()
        await asyncio.gather(*(writes(group, f"o{n}", 1, 0.0) for n in range(5)))
        lingering = group.submit(unit("late", 0, "late"))
        await asyncio.sleep(0.1)
        assert not lingering.done()
        await group.aclose()
        assert isinstance((await outcomes([lingering]))[0], Closed)

    run(main())


@pytest.mark.parametrize("turns", range(5))
def test_a_close_leaves_no_writer_waiting(turns: int) -> None:
    """It once cancelled a group's task before that had begun, and nobody told the group's writers."""

    async def main() -> None:
        log = FakeLog()
        group = started(log)
        futures = [group.submit(unit("s", None, "x")) for _ in range(2)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await group.aclose()
        done, _ = await asyncio.wait(futures, timeout=60)
        assert len(done) == len(futures)
        for future in futures:
            assert isinstance(future.exception() or future.result(), int | Closed | AppendUnknown)

    run(main())
