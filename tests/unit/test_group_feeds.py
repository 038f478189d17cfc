"""The feeds of partitions that one process makes of its one feed of groups (`bufstore.buffer.groups.feeds`)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.groups.feeds import Feeds, PartitionFeed
from bufstore.buffer.places import first_place, place
from bufstore.errors import Closed, LogUnavailable
from bufstore.jetstream.messages import AppendUnknown, StoredMessage
from thorough import examples
from unit.fake_log import run


class Source:
    """A server's feed of groups, with at most `ahead` unacknowledged ones. A group is a string of partitions."""

    def __init__(self, server: Server, start: int, wake: Callable[[], None]) -> None:
        self.lost: str | None = None
        start = max(start, 1)
        self.start, self.acked = start, start - 1
        self._server, self._next, self._wake = server, start, wake

    def take(self) -> list[StoredMessage]:
        found = [m for m in self._server.messages if self._next <= m.seq <= self.acked + self._server.ahead]
        if found:
            if len(found) > self._server.at_once:
                self._wake()
            found = found[: self._server.at_once]
            self._next = found[-1].seq + 1
            self._server.given += len(found)
        return found if self.lost is None else []

    @property
    def crowded(self) -> bool:
        return self._next - self.acked > self._server.ahead // 2

    async def ack(self, seq: int) -> None:
        self.acked = max(self.acked, seq)
        self._wake()

    async def close(self) -> None:
        self.lost = self.lost or "closed"
        self._server.open_sources -= 1

    def arrived(self) -> None:
        self._wake()

    def lose(self) -> None:
        self.lost = "the connection was lost"
        self._wake()


class Server:
    def __init__(
        self, groups: Sequence[str] = (), ahead: int = 100, at_once: int = 1000, large: int = 0, large_max: int = 1
    ) -> None:
        """`at_once`: how many groups arrive at a time. `large`: the bytes of each entry, which stand elsewhere."""
        self.large = large
        self.ahead, self.at_once = ahead, at_once
        self.messages: list[StoredMessage] = []
        self.sources: list[Source] = []
        self.open_sources = 0
        self.fails: Exception | None = None
        #: How many groups were delivered, and how many of their entries were read.
        self.given = self.read = 0
        #: Set while consumers are made at once.
        self.made = asyncio.Event()
        self.made.set()
        self.feeds = Feeds(self.follow, self.split, large_max)
        for group in groups:
            self.write(group)

    def write(self, partitions: str) -> None:
        self.messages.append(StoredMessage("groups", len(self.messages) + 1, None, partitions.encode()))
        for source in self.sources:
            source.arrived()

    async def follow(self, seq: int, wake: Callable[[], None]) -> Source:
        await asyncio.sleep(0)
        await self.made.wait()
        if self.fails is not None:
            raise self.fails
        self.sources.append(Source(self, seq, wake))
        self.open_sources += 1
        assert self.open_sources <= 2, "each has so much on its way, and the server bounds that of all"
        return self.sources[-1]

    async def split(
        self, message: StoredMessage, partitions: Collection[int]
    ) -> tuple[int, list[tuple[int, StoredMessage]]]:
        await asyncio.sleep(0)
        found = [
            (int(p), StoredMessage(f"s.{p}.t", place(message.seq, n), None, bytes(self.large)))
            for n, p in enumerate(message.body.decode())
            if int(p) in partitions or n == len(message.body) - 1
        ]
        self.read += len(found)
        return message.seq - 1, found

    def expected(self, partition: int, start: int) -> list[int]:
        places = [place(m.seq, n) for m in self.messages for n, p in enumerate(m.body.decode()) if int(p) == partition]
        return [at for at in places if at >= start]

    async def open(self, partition: int, start: int = 0) -> PartitionFeed:
        return await self.feeds.open(partition, start, lambda: None)


async def settled() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


def taken(feed: PartitionFeed) -> list[int]:
    return [m.seq for m in feed.take()]


async def commit(feeds: Sequence[PartitionFeed], got: Sequence[list[int]]) -> None:
    """Take what has arrived at each feed, and acknowledge all of it together."""
    for feed, of_one in zip(feeds, got, strict=True):
        of_one += taken(feed)
        if of_one:
            feed.passed(of_one[-1])
    for feed, of_one in zip(feeds, got, strict=True):
        if of_one:
            await feed.ack(of_one[-1])


async def one_goes_on(server: Server) -> tuple[PartitionFeed, PartitionFeed]:
    """Open two partitions: the first passes nothing, and the other acknowledges everything that comes."""
    zero, one = await server.open(0), await server.open(1)
    for _ in range(20):
        await settled()
        if arrived := taken(one):
            await one.ack(arrived[-1])
    return zero, one


def test_each_partition_gets_its_own_entries_in_order() -> None:
    async def main() -> None:
        server = Server(["0110", "1", "002"])
        feeds = [await server.open(p) for p in (0, 1, 2)]
        await settled()
        assert [taken(feed) for feed in feeds] == [server.expected(p, 0) for p in (0, 1, 2)]
        await server.feeds.aclose()
        assert server.open_sources == 0

    run(main())


def test_groups_that_were_removed_before_they_were_flushed_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the flusher went past them without a line; others told of a purge or an erasure, which is normal."""

    async def main() -> None:
        server = Server(["01", "0", "1", "01", "0", "1"], ahead=2)
        feeds = [await server.open(p) for p in (0, 1)]
        got: tuple[list[int], list[int]] = ([], [])
        await settled()
        del server.messages[2:4]  # an operator's purge, say: the server has delivered two groups
        server.ahead = 100
        for _ in range(3):
            await commit(feeds, got)
            await settled()
        assert got == (server.expected(0, 0), server.expected(1, 0))
        late = await server.open(0, place(5, 0))  # the group before its first one is not its own to miss
        await settled()
        assert taken(late) == [place(5, 0)]
        await server.feeds.aclose()

    run(main())
    gaps = [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "log_gap"]
    assert gaps == ["messages 3 to 4 were removed from the log before they were flushed; run bufstore verify"]


def test_large_entries_are_given_out_as_far_as_there_is_room() -> None:
    """Regression: their bytes did not count, and a backlog of them filled the memory."""

    async def main() -> None:
        server = Server(["0", "1", "01"] * 20, large=10, large_max=30)
        zero, one = await server.open(0), await server.open(1)
        got: tuple[list[int], list[int]] = ([], [])
        for _ in range(200):
            await settled()
            assert sum(len(feed._arrived) for feed in (zero, one)) <= 4, "30 bytes, and the last group"
            await commit((zero, one), got)
        assert got == (server.expected(0, 0), server.expected(1, 0))
        await server.feeds.aclose()
        assert server.open_sources == 0

    run(main())


def test_a_partition_that_passes_none_of_its_large_entries_does_not_stop_the_others() -> None:
    async def main() -> None:
        server = Server(["0", "1"] * 20, large=10, large_max=30)
        zero, one = await one_goes_on(server)
        assert zero.aside
        assert one.acked == server.expected(1, 0)[-1]
        await server.feeds.aclose()

    run(main())


@pytest.mark.parametrize("groups", [["0"] + ["1"] * 20, ["01"] + ["1"] * 20])
def test_one_large_entry_that_is_not_passed_stops_the_others_for_seconds_only(groups: list[str]) -> None:
    """Regression: it took all the room before they had passed anything behind it."""

    async def main() -> None:
        server = Server(groups, large=10, large_max=10)
        zero, one = await server.open(0), await server.open(1)
        got: list[int] = []
        for _ in range(300):
            await asyncio.sleep(0.1)
            await commit([one], [got])
        assert got == server.expected(1, 0)
        assert taken(zero) == server.expected(0, 0)
        await server.feeds.aclose()

    run(main())


def test_a_partition_that_is_added_behind_what_was_delivered_misses_nothing() -> None:
    """Postgres went back: a partition is taken again from an older cursor while others go on."""

    async def main() -> None:
        server = Server(["01"] * 10)
        one = await server.open(1)
        await settled()
        assert taken(one) == server.expected(1, 0)
        await one.ack(place(9, 1))
        late = await server.open(0, first_place(4))
        await settled()
        assert taken(late) == server.expected(0, first_place(4))
        assert taken(one) == []  # nothing comes twice
        server.write("10")
        await settled()
        assert taken(one) == [place(11, 0)]
        assert taken(late) == [place(11, 1)]
        await server.feeds.aclose()

    run(main())


def test_partitions_that_are_opened_together_follow_the_groups_few_times() -> None:
    async def main() -> None:
        server = Server(["0123456789"] * 20)
        feeds = await asyncio.gather(*(server.open(p, first_place(p)) for p in range(10)))
        await settled()
        for p, feed in enumerate(feeds):
            assert taken(feed) == server.expected(p, first_place(p))
        assert len(server.sources) <= 2
        await server.feeds.aclose()
        assert server.open_sources == 0

    run(main())


@pytest.mark.parametrize("starts", [(0, 0, 0), (30, 20, 10)])
@pytest.mark.parametrize("turns", [0, 2, 8])
def test_partitions_that_are_opened_one_after_another_do_not_get_the_backlog_twice(
    starts: Sequence[int], turns: int
) -> None:
    """Regression: a second delivery went over all of the backlog beside the first, and never caught up."""

    async def main() -> None:
        server = Server(["012"] * 400, ahead=50, at_once=1)
        feeds = []
        for p in range(3):
            feeds.append(await server.open(p, first_place(starts[p])))
            for _ in range(turns):
                await asyncio.sleep(0)
        got: list[list[int]] = [[], [], []]
        expected = [server.expected(p, first_place(starts[p])) for p in range(3)]
        while any(not of_one or of_one[-1] < all_of_it[-1] for of_one, all_of_it in zip(got, expected, strict=True)):
            await asyncio.sleep(0)
            await commit(feeds, got)
        assert got == expected
        assert server.open_sources == 1
        assert server.given <= 400 + 2 * 50, "but for what was on its way"
        await server.feeds.aclose()
        assert server.open_sources == 0

    run(main())


def test_of_a_group_no_more_is_read_than_somebody_waits_for() -> None:
    async def main() -> None:
        server = Server(["0" * 9 + "1" + "2" * 9] * 4)
        one = await server.open(1)
        await settled()
        assert taken(one) == server.expected(1, 0)
        assert one.through is not None
        assert one.through.seq == place(4, 18), "the last of the log, whatever it is of"
        assert server.read == 4 * 2
        await server.feeds.aclose()

    run(main())


def test_who_is_served_while_a_group_is_read_gets_its_part_of_it() -> None:
    async def main() -> None:
        server = Server([])
        zero = await server.open(0)
        reading, go_on = asyncio.Event(), asyncio.Event()
        split = server.split

        async def slow(message: StoredMessage, partitions: Collection[int]) -> list[tuple[int, StoredMessage]]:
            found = await split(message, partitions)
            reading.set()
            await go_on.wait()
            return found

        server.feeds._split = zero.delivery._split = slow  # type: ignore[union-attr]
        server.write("10")
        await reading.wait()
        one = await server.open(1, first_place(1))
        go_on.set()
        await settled()
        assert taken(zero) == [place(1, 1)]
        assert taken(one) == [place(1, 0)]
        await server.feeds.aclose()

    run(main())


def test_when_the_groups_cannot_be_followed_for_one_the_others_go_on() -> None:
    async def main() -> None:
        server = Server(["01"] * 10)
        one = await server.open(1)
        await settled()
        taken(one)
        server.fails = LogUnavailable("away")
        with pytest.raises(LogUnavailable):
            await server.open(0, 0)
        server.write("1")
        await settled()
        assert taken(one) == [place(11, 0)]
        server.fails = None
        await one.close()
        again = await server.open(1, place(3, 1))
        await settled()
        assert taken(again) == server.expected(1, place(3, 1))
        await server.feeds.aclose()

    run(main())


def test_who_opens_while_all_is_closed_gets_nothing_and_leaves_nothing() -> None:
    async def main() -> None:
        server = Server(["0"])
        opening = asyncio.create_task(server.open(0))
        await asyncio.sleep(0)
        await server.feeds.aclose()
        await asyncio.gather(opening, return_exceptions=True)
        with pytest.raises(Closed):
            await server.open(1)
        assert server.open_sources == 0

    run(main())


@pytest.mark.parametrize("turns", range(8))
def test_opening_may_be_cancelled_at_any_moment(turns: int) -> None:
    async def main() -> None:
        server = Server(["01"] * 5)
        one = await server.open(1)
        await settled()
        taken(one)
        opening = asyncio.create_task(server.open(0))
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        server.write("1")
        await settled()
        # The feed goes on, or says that it is lost.
        assert taken(one) == [place(6, 0)] or one.lost is not None
        await server.feeds.aclose()
        assert server.open_sources == 0

    run(main())


def test_groups_are_acknowledged_as_far_as_every_partition_in_them_has_passed_them() -> None:
    async def main() -> None:
        server = Server(["01", "0", "1", "2"])
        zero, one = await server.open(0), await server.open(1)
        await settled()
        await one.ack(place(3, 0))
        source = server.sources[-1]
        assert source.acked == 0
        await zero.ack(place(1, 0))
        assert source.acked == 1
        await zero.ack(place(2, 0))
        assert source.acked == 4  # nobody here follows partition 2
        await server.feeds.aclose()

    run(main())


def test_while_nobody_acknowledges_what_is_delivered_is_bounded() -> None:
    async def main() -> None:
        server = Server(["01"] * 50, ahead=8)
        zero, one = await server.open(0), await server.open(1)
        await settled()
        assert len(taken(zero)) == len(taken(one)) == 8
        assert zero.crowded
        await server.feeds.aclose()

    run(main())


def test_a_partition_that_passes_nothing_stops_no_other_and_misses_nothing() -> None:
    async def main() -> None:
        server = Server(["01"] * 50, ahead=8)
        zero, one = await one_goes_on(server)
        assert one.delivered == place(50, 1), "it goes on"
        held = taken(zero)
        assert len(held) <= 8
        assert zero.crowded
        assert zero.lost is None
        assert zero.through is None, "its cursor does not go where it was not delivered"
        await zero.ack(held[-2])
        await settled()
        assert taken(zero) == []
        await zero.ack(held[-1])
        for _ in range(20):
            await settled()
            if arrived := taken(zero):
                held += arrived
                await zero.ack(arrived[-1])
        assert held == server.expected(0, 0)
        assert taken(one) == [], "nothing comes twice"
        server.write("01")
        await settled()
        assert (taken(zero), taken(one)) == ([place(51, 0)], [place(51, 1)])
        await server.feeds.aclose()
        assert server.open_sources == 0

    run(main())


def test_partitions_that_were_committed_together_are_not_late_for_each_other() -> None:
    """Regression: the first partition that acknowledged set the others aside, and they got everything again."""

    async def main() -> None:
        server = Server(["0123"] * 200, ahead=8)
        feeds = [await server.open(p) for p in range(4)]
        got: list[list[int]] = [[], [], [], []]
        for _ in range(40):
            await settled()
            await commit(feeds, got)
        assert got == [server.expected(p, 0) for p in range(4)]
        assert len(server.sources) == 1
        await server.feeds.aclose()

    run(main())


def test_who_waits_for_a_delivery_is_not_taken_for_one_to_whom_nothing_is_delivered() -> None:
    """Both deliveries are further on: its turn comes when the second one ends, and opening it again would not help."""

    async def main() -> None:
        server = Server(["012"] * 40, ahead=8)
        zero = await server.open(0)
        while zero.delivered < place(40, 0):
            await settled()
            await zero.ack(taken(zero)[-1])
        one = await server.open(1, 0)
        await settled()
        got = taken(one)
        two = await server.open(2, 0)
        assert two.delivery is None
        assert two.crowded
        while two.delivered < place(40, 2):
            await one.ack(got[-1])
            await settled()
            got += taken(one)
            if arrived := taken(two):
                await two.ack(arrived[-1])
        await server.feeds.aclose()

    run(main())


def test_a_partition_that_catches_up_holds_up_no_other() -> None:
    """Neither a partition that was set aside does, nor one that is taken over with its owner's backlog."""

    async def main() -> None:
        server = Server(["01"] * 40, ahead=8)
        zero, one = await server.open(0), await server.open(1)
        for _ in range(12):
            await settled()
            if arrived := taken(one):
                await one.ack(arrived[-1])
        assert one.delivered == place(40, 1)
        two = await server.open(2, 0)
        held, waited, now = taken(zero), 0, 0
        await zero.ack(held[-1])
        while len(held) < len(server.expected(0, 0)) and now < 500:
            now += 1
            server.write("12" if now % 3 else "012")
            await asyncio.sleep(0)
            waited = 0 if (arrived := taken(one)) else waited + 1
            if arrived:
                await one.ack(arrived[-1])
            assert waited < 12
            if (arrived := taken(zero)) and now % 4 == 0:
                await zero.ack(arrived[-1])
            held += arrived
            if arrived := taken(two):
                await two.ack(arrived[-1])
        for _ in range(200):
            await settled()
            held += taken(zero)
            await zero.ack(held[-1])
            for feed in (one, two):
                if arrived := taken(feed):
                    await feed.ack(arrived[-1])
        assert held == server.expected(0, 0)
        assert [feed.delivered for feed in (one, two)] == [server.expected(p, 0)[-1] for p in (1, 2)]
        assert zero.delivery is one.delivery is two.delivery
        assert server.open_sources == 1
        assert len(server.sources) < 6
        await server.feeds.aclose()
        assert server.open_sources == 0

    run(main())


class Owner:
    """An owner that takes partitions and gives them up at random; one of them rarely passes entries."""

    def __init__(self, server: Server, chance: random.Random) -> None:
        self.server, self.chance, self.calm = server, chance, False
        self.partitions = range(chance.choice((2, 3, 4)))
        self.slow = chance.choice(self.partitions)
        self.feeds: dict[int, PartitionFeed] = {}
        self.opening: set[int] = set()
        self.cursors = dict.fromkeys(self.partitions, 0)
        self.pending: dict[int, list[int]] = {p: [] for p in self.partitions}
        self.got: dict[int, list[int]] = {p: [] for p in self.partitions}

    async def take(self, partition: int) -> None:
        self.pending[partition] = []
        with contextlib.suppress(LogUnavailable):
            self.feeds[partition] = await self.server.open(partition, self.cursors[partition] + 1)
        self.opening.discard(partition)

    async def own(self, turns: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(turns):
                self.server.fails = LogUnavailable("away") if self.chance.random() < 0.05 and not self.calm else None
                for partition in self.partitions:
                    feed = self.feeds.get(partition)
                    if feed is not None and (feed.lost or (self.chance.random() < 0.03 and not self.calm)):
                        del self.feeds[partition]
                        await feed.close()
                    elif feed is None and partition not in self.opening and self.chance.random() < 0.5:
                        self.opening.add(partition)
                        tasks.create_task(self.take(partition))
                await asyncio.sleep(0)

    async def flush(self, turns: int) -> None:
        for _ in range(turns):
            for partition, feed in list(self.feeds.items()):
                if feed.lost is None:
                    await self.flush_one(partition, feed)
            await asyncio.sleep(0)

    async def flush_one(self, partition: int, feed: PartitionFeed) -> None:
        pending = self.pending[partition]
        pending += taken(feed)
        if pending and (partition != self.slow or self.calm or self.chance.random() < 0.02):
            count = self.chance.randint(1, len(pending))
            self.got[partition] += pending[:count]
            self.cursors[partition] = pending[count - 1]
            del pending[:count]
            await feed.ack(self.cursors[partition])
        elif not pending and self.chance.random() < 0.3 and (through := feed.through) is not None:
            self.cursors[partition] = max(self.cursors[partition], through.seq)
            await feed.ack(self.cursors[partition])

    async def write(self, groups: int) -> None:
        for _ in range(groups):
            count = self.chance.choice((0, 1, 1, 2, 3))
            self.server.write("".join(str(self.chance.choice(self.partitions)) for _ in range(count)))
            for _ in range(self.chance.choice((0, 1, 5))):
                await asyncio.sleep(0)


@given(seed=st.integers(0, 2**32))
@examples(20)
def test_whatever_is_taken_and_given_up_each_entry_is_delivered_once_and_in_order(seed: int) -> None:
    async def main() -> None:
        chance = random.Random(seed)
        server = Server(ahead=chance.choice((4, 6, 10)))
        owner = Owner(server, chance)
        await asyncio.gather(owner.own(200), owner.flush(200), owner.write(40))
        owner.calm, server.fails = True, None
        await asyncio.gather(owner.own(1000), owner.flush(1000))
        assert owner.got == {p: server.expected(p, 0) for p in owner.partitions}
        for feed in owner.feeds.values():
            await feed.close()
        await server.feeds.aclose()
        assert server.open_sources == 0

    run(main())


def test_who_acknowledges_does_not_wait_for_a_consumer() -> None:
    """One flush acknowledges all partitions, and the next flush waits for that."""

    async def main() -> None:
        server = Server(["01"] * 50, ahead=8)
        zero, one = await one_goes_on(server)
        held = taken(zero)
        server.made.clear()
        async with asyncio.timeout(0.5):
            await zero.ack(held[-1])
            server.write("01")
            await settled()
            await one.ack(taken(one)[-1])
        server.made.set()
        for _ in range(20):
            await settled()
            if arrived := taken(zero):
                held += arrived
                await zero.ack(arrived[-1])
        assert held == server.expected(0, 0)
        await server.feeds.aclose()
        assert server.open_sources == 0

    run(main())


@pytest.mark.parametrize("error", [LogUnavailable("away"), AppendUnknown("no answer"), ValueError("a bug")])
def test_who_cannot_follow_again_is_lost(error: Exception) -> None:
    async def main() -> None:
        server = Server(["01"] * 50, ahead=8)
        zero, one = await one_goes_on(server)
        server.fails = error
        await zero.ack(taken(zero)[-1])  # the entries are committed, so the ack succeeds
        await settled()
        assert zero.lost is not None
        server.write("1")
        await settled()
        assert taken(one) == [place(51, 0)]
        await server.feeds.aclose()

    run(main())


@pytest.mark.parametrize("turns", range(4))
def test_who_would_be_served_by_a_task_that_somebody_cancels_is_lost_or_served(turns: int) -> None:
    """Regression: cancelled before it began, the task was never begun anew."""

    async def main() -> None:
        server = Server(["01"] * 50, ahead=8)
        zero, _ = await one_goes_on(server)
        await zero.ack(taken(zero)[-1])
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in asyncio.all_tasks():
            if task.get_name() == "bufstore-feeds-tidy":
                task.cancel()
        await settled()
        if zero.lost is None:
            assert taken(zero)
        again = await server.open(0, 0)
        await again.ack(place(50, 0))
        server.write("0")
        await settled()
        assert taken(again)[-1:] == [place(51, 0)]
        await server.feeds.aclose()

    run(main())


def test_a_feed_that_is_lost_stays_lost_and_another_takes_its_place() -> None:
    async def main() -> None:
        server = Server(["01"] * 3)
        zero, one = await server.open(0), await server.open(1)
        await settled()
        assert len(taken(zero)) == 3
        server.sources[-1].lose()
        await settled()
        assert zero.lost == "the connection was lost"
        again = await server.open(0, place(2, 0))
        server.write("01")
        await settled()
        assert taken(again) == server.expected(0, place(2, 0))
        assert zero.lost == "the connection was lost"
        assert taken(zero) == []
        # The other feed had not looked yet: it goes on where it was, or is lost, too.
        assert one.lost is not None or taken(one) == server.expected(1, 0)
        await server.feeds.aclose()

    run(main())


def test_who_has_not_looked_when_a_lost_delivery_is_ended_is_served_by_another() -> None:
    """Another feed is closed at that moment, which ends the delivery."""

    async def main() -> None:
        server = Server(["01"] * 50, ahead=8)
        aside, one = await one_goes_on(server)
        server.sources[-1].lose()
        await aside.close()
        server.write("1")
        await settled()
        assert one.lost is None
        assert taken(one) == [place(51, 0)]
        await server.feeds.aclose()

    run(main())


def test_who_is_served_by_what_ends_at_once_is_lost() -> None:
    """Regression: such a feed waited for ever, neither served nor lost, because its turn had come."""

    async def main() -> None:
        server = Server(["01"])
        follow = server.follow

        async def lost_at_once(seq: int, wake: Callable[[], None]) -> Source:
            source = await follow(seq, wake)
            source.lose()
            return source

        server.feeds._follow = lost_at_once
        feeds = [await server.open(p) for p in range(2)]
        await settled()
        assert all(feed.lost for feed in feeds)
        server.feeds._follow = follow
        again = await server.open(0)
        await settled()
        assert taken(again) == [place(1, 0)]
        await server.feeds.aclose()
        assert server.open_sources == 0

    run(main())


def test_a_doubt_about_one_partition_replaces_what_delivers_to_all_once() -> None:
    """Regression: a partition that was opened again got the same delivery, unchanged."""

    async def main() -> None:
        server = Server(["012"] * 3)
        feeds = [await server.open(p) for p in range(3)]
        await settled()
        for feed in feeds:
            await feed.ack(taken(feed)[-1])
        made = len(server.sources)
        for feed in feeds:
            feed.doubt("nothing arrives")
        server.write("012")
        await settled()
        assert [(feed.lost, taken(feed)) for feed in feeds] == [("nothing arrives", [])] * 3
        again = []
        for old in feeds:
            again.append(await server.open(old.partition, old.acked + 1))
            old.doubt("nothing arrives still")
            await old.close()
        await settled()
        assert [taken(feed) for feed in again] == [[place(4, p)] for p in range(3)]
        assert len(server.sources) == made + 1
        await server.feeds.aclose()
        assert server.open_sources == 0

    run(main())


def test_who_is_set_aside_again_while_a_consumer_is_removed_is_served_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the task that had served the partition was still busy, and skipped it as one whose turn had come."""

    async def main() -> None:
        removed = asyncio.Event()
        removed.set()
        close = Source.close

        async def slowly(source: Source) -> None:
            await removed.wait()
            await close(source)

        monkeypatch.setattr(Source, "close", slowly)
        server = Server(["012"] * 60, ahead=10)
        feeds = [await server.open(p) for p in range(3)]
        got: list[list[int]] = [[], [], []]
        while not feeds[0].aside:
            await settled()
            await commit(feeds[1:], got[1:])
        for p in (1, 2):
            await feeds[p].close()
        feeds[1:] = await asyncio.gather(*(server.open(p, first_place(11)) for p in (1, 2)))
        await settled()
        removed.clear()
        got[0] += taken(feeds[0])
        await feeds[0].ack(got[0][-1])
        while not feeds[0].aside:
            await settled()
            await commit(feeds[1:], got[1:])
        got[0] += taken(feeds[0])
        await feeds[0].ack(got[0][-1])
        removed.set()
        for _ in range(60):
            await settled()
            await commit(feeds, got)
        assert got[0] == server.expected(0, 0)
        await server.feeds.aclose()

    run(main())


def test_the_cursor_of_an_idle_partition_does_not_make_the_groups_come_again_from_long_ago() -> None:
    async def main() -> None:
        server = Server(["0", *["1"] * 20])
        zero, one = await server.open(0), await server.open(1)
        await settled()
        taken(zero)
        await one.ack(taken(one)[-1])
        through = zero.through
        assert through is not None and through.seq == place(21, 0)
        await zero.ack(through.seq)
        await server.open(2, 0)
        assert server.sources[-1].start == 1
        server.sources[-1].lose()
        await settled()
        await server.open(2, first_place(20))
        assert server.sources[-1].start == 20
        await server.feeds.aclose()

    run(main())


def test_through_is_not_told_while_an_entry_of_the_partition_waits_to_be_taken() -> None:
    async def main() -> None:
        server = Server(["01"])
        zero: Any = await server.open(0)
        await settled()
        assert zero.through is None
        taken(zero)
        assert zero.through.seq == place(1, 1)
        await server.feeds.aclose()

    run(main())
