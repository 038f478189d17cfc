"""A node that was cut off from its cluster answers before it has caught up: its answers are not believed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from bufstore import ConfigError, LogUnavailable, NatsConfig
from bufstore.config import BufferConfig, LogConfig
from bufstore.jetstream.client import ListeningClient
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.errors import ConsumerMissing
from bufstore.jetstream.messages import Outgoing, Part, StoredMessage
from bufstore.jetstream.stream import NatsStream
from bufstore.nats.feed import consumer_config, open_feed
from bufstore.nats.leftovers import Leftovers
from bufstore.nats.log import NatsLog
from bufstore.nats.shared_state import NatsSharedState
from unit.fake_log import run
from unit.group_server import SUBJECTS
from unit.test_flusher import Bench, FeedServer, bench
from unit.write_world import Instance, World, test


class Bucket:
    """The leader's shared-state bucket, and the copy that answers reads with a wildcard."""

    def __init__(self) -> None:
        self.leader: dict[str, StoredMessage] = {}
        self.copy: dict[str, StoredMessage] = {}
        self.lags = True
        self.leader_reads = 0
        self._seq = 0

    async def submit(self, messages: Sequence[Outgoing]) -> int:
        (message,) = messages
        self._seq += 1
        self.leader[message.subject] = StoredMessage(message.subject, self._seq, None, message.body)
        if not self.lags:
            self.copy = dict(self.leader)
        return self._seq

    async def last(self, subjects: Sequence[str], timeout_s: float) -> dict[str, StoredMessage]:
        return dict(self.copy)

    async def after(self, subject: str, seq: int, timeout_s: float) -> list[StoredMessage]:
        self.leader_reads += 1
        return sorted(self.leader.values(), key=lambda m: m.seq)


def bucket_of(replicas: int) -> tuple[NatsSharedState, Bucket]:
    shared, bucket = NatsSharedState(Connection(NatsConfig(), "t"), "$JS.API", LogConfig(replicas=replicas)), Bucket()
    shared._stream = cast(Any, bucket)
    shared._writes = cast(Any, bucket)
    return shared, bucket


def test_a_member_goes_by_no_list_that_lacks_its_own_last_renewal() -> None:
    """As if alone, it would take everything from the others, who take it back, until the copy has caught up."""

    async def main() -> None:
        shared, bucket = bucket_of(3)
        await shared.renew_member("a", 2)
        await shared.renew_member("b", 2)  # in truth another process does this
        shared._renewed.pop("b")
        assert await shared.members() == {"a": 1, "b": 2}
        bucket.copy = dict(bucket.leader)
        await shared.renew_member("a", 2)
        assert await shared.members() == {"a": 3, "b": 2}, "not the record of before"
        bucket.lags = False
        await shared.renew_member("a", 2)
        reads = bucket.leader_reads
        assert await shared.members() == {"a": 4, "b": 2}
        assert bucket.leader_reads == reads, "a copy that has it is as good as the leader"

    run(main())


def test_who_is_no_member_asks_the_leader_for_the_members() -> None:
    async def main() -> None:
        shared, bucket = bucket_of(3)
        await shared.renew_member("a", 2)
        shared._renewed.clear()
        assert await shared.members() == {"a": 1}
        alone, bucket = bucket_of(1)
        bucket.lags = False
        await alone.renew_member("a", 2)
        assert await alone.members() == {"a": 1}
        assert bucket.leader_reads == 0

    run(main())


class Log(NatsStream):
    """The API of a stream as its clients see it; the node that leads the consumer has the stream up to `has`."""

    def __init__(self, end: int, has: int) -> None:
        super().__init__(cast(Connection, Client()), "$JS.API", "T", 3)
        self._end, self.has = end, has
        self.asked: list[str] = []

    async def api(self, verb: str, body: dict[str, Any] | None = None, timeout_s: float = 5.0) -> dict[str, Any]:
        self.asked.append(verb.split(".")[1])
        return {"num_pending": max(0, self.has - 10), "cluster": {"leader": "n1"}}

    async def ends(self, filters: Sequence[str], timeout_s: float) -> list[int]:
        return [self._end]


class Client:
    """A connection, its client and a subscription, which take whatever is sent and asked."""

    is_connected = True
    is_closed = False
    max_payload = 1 << 20
    pending_data_size = 0
    #: How many subscriptions were refused for want of room.
    no_room = 0

    def client(self) -> Client:
        return self

    def new_inbox(self) -> str:
        return "_INBOX.x"

    async def listen(self, subject: str, heard: object) -> Client:
        return self

    async def unsubscribe(self) -> None: ...

    async def _send_ping(self, pong: asyncio.Future[bool]) -> None:
        pong.set_result(True)

    async def publish(self, subject: str, data: bytes, reply: str) -> None: ...

    def on_connect(self, hook: object) -> None: ...

    def on_lost(self, hook: object) -> None: ...


async def _opened(log: Log) -> None:
    config = consumer_config("t-flusher-0-1", "t.0.*", 11, 100)
    await open_feed(cast(ListeningClient, Client()), log, config, lambda: None, 1000, lambda _: None, 2.0)


def test_no_consumer_is_followed_whose_node_lacks_what_the_log_holds() -> None:
    async def main() -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(LogUnavailable, match="n1, which has not caught up"):
            await _opened(Log(end=20, has=10))
        assert asyncio.get_running_loop().time() - began < 1.0, "not after a patience"

    run(main())


def test_a_consumer_that_has_what_the_log_holds_is_followed_at_once() -> None:
    async def main() -> None:
        idle = Log(end=10, has=10)
        await _opened(idle)
        assert idle.asked == ["CREATE"]
        busy = Log(end=20, has=20)
        await _opened(busy)
        assert busy.asked == ["CREATE"]

    run(main())


def test_what_arrives_while_a_consumer_is_made_does_not_count_against_its_node() -> None:
    class Late(Log):
        async def ends(self, filters: Sequence[str], timeout_s: float) -> list[int]:
            self._end = self.has = 11
            return await super().ends(filters, timeout_s)

    async def main() -> None:
        await _opened(Late(end=10, has=10))

    run(main())


class Electing(NatsLog):
    """A log whose consumers can neither be made nor removed while `electing`."""

    def __init__(self) -> None:
        super().__init__(cast(Connection, Client()), "$JS.API", BufferConfig())
        self.electing = True
        self.made: list[tuple[str, float]] = []
        self.there: set[str] = set()
        self.removals = 0

    async def api(self, verb: str, body: dict[str, Any] | None = None, timeout_s: float = 5.0) -> dict[str, Any]:
        what, name = verb.split(".")[1], verb.split(".")[3]
        if what == "CREATE":
            self.made.append((name, timeout_s))
            self.there.add(name)  # the servers make it in the end
        if self.electing:
            await asyncio.sleep(timeout_s)
            raise LogUnavailable("NATS does not answer")
        if what == "DELETE":
            self.removals += 1
            if name not in self.there:
                raise ConsumerMissing("consumer not found")
            self.there.remove(name)
        return {"num_pending": 1}


def test_where_no_consumer_can_be_made_another_is_tried_soon_and_none_is_left_behind() -> None:
    async def main() -> None:
        log = Electing()
        began = asyncio.get_running_loop().time()
        for term in range(1, 6):
            with pytest.raises(LogUnavailable):
                await log.follow(f"me{term}", "t.groups.0", 1, lambda: None)
            if term == 1:
                assert asyncio.get_running_loop().time() - began < 4.0
        assert [wait for _, wait in log.made] == [2.0, 4.0, 8.0, 8.0, 8.0], "where all is slow, it gets more time"
        log.electing = False
        feed = await log.follow("me6", "t.groups.0", 1, lambda: None)
        log.there.add(log.made[4][0])  # a late request makes it
        await asyncio.sleep(15)
        assert log.there == {log.made[-1][0]}, "only that which is followed"
        log.electing = True
        await feed.close()
        log.electing = False
        await asyncio.sleep(3)
        assert not log.there
        await asyncio.sleep(15)
        assert log.removals < 60, "that ends"
        with pytest.raises(LogUnavailable):
            log.electing = True
            await log.follow("me7", "t.groups.0", 1, lambda: None)
        assert log.made[-1][1] == 2.0, "it had worked again"
        await log.aclose()

    run(main())


def test_a_consumer_that_may_not_be_removed_is_left_alone() -> None:
    async def main() -> None:
        tried: list[str] = []

        async def remove(name: str) -> None:
            tried.append(name)
            raise ConfigError("NATS does not permit this")

        left = Leftovers(remove)
        left.add("c")
        await asyncio.sleep(60)
        assert 1 <= len(tried) <= 6
        await left.aclose()

    run(main())


class Replicated(FeedServer):
    """A log whose answering copy has the messages up to `has` only."""

    def __init__(self) -> None:
        super().__init__()
        self.has: int | None = None
        self.leader_lags = False

    async def part(self, subject: str, seq: int, timeout_s: float, limit: int, bytes_max: int = 0) -> Part:
        found, more = await super().part(subject, seq, timeout_s, limit, bytes_max)
        shown = [m for m in found if self.has is None or m.seq <= self.has]
        return Part(shown, more if len(shown) == len(found) else 0)

    async def identity(self, seq: int) -> StoredMessage | None:
        return None if self.leader_lags and seq > (self.has or seq) else await super().identity(seq)

    async def fresh_end(self, timeout_s: float) -> int:
        return self.stream.last_of(SUBJECTS.groups)


async def _three_entries(world: World, one: Instance, log: Replicated) -> None:
    """Write three entries; the process forgets them, and the copy has only the first."""
    for n in range(3):
        await one.append([n])
    log.has = 1
    one.log._tail._kept.clear()  # type: ignore[attr-defined]


async def _seen(one: Instance) -> Sequence[StoredMessage]:
    subject = SUBJECTS.of("t")
    return (await one.log.seen_after({subject: 0}))[subject]


def test_what_a_copy_does_not_show_is_asked_of_the_leader() -> None:
    """A thread's tail without its last entries looks like a thread that lost them."""
    log = Replicated()

    async def main(world: World, one: Instance) -> None:
        await _three_entries(world, one, log)
        assert await _seen(one) == log.messages

    test(main, server=log)


def test_what_nobody_shows_and_must_be_there_is_not_taken_for_purged() -> None:
    log = Replicated()

    async def main(world: World, one: Instance) -> None:
        await _three_entries(world, one, log)
        log.leader_lags = True
        with pytest.raises(LogUnavailable, match="group 3 must be in the log"):
            await _seen(one)
        log.has = None
        assert await _seen(one) == log.messages
        log.expire_below(log.last_seq)
        one.log._tail._kept.clear()  # type: ignore[attr-defined]
        assert await _seen(one) == log.messages[-1:], "what is purged is gone"

    test(main, server=log)


@pytest.mark.long
def test_a_hole_is_not_filled_from_a_copy_that_lacks_what_was_delivered() -> None:
    """An entry that is not found counts as missing, so a healthy entry would be parked."""

    async def main(it: Bench, log: Replicated) -> None:
        await it.start()
        await it.writer.append([0])
        assert await it.flushed("t")
        log.has = log.stream.end
        log.hidden.add(2)
        for n in (1, 2):
            await it.writer.append([n])
        await asyncio.sleep(30)
        assert it.ledger.parked.entries == {}
        log.has = None
        assert await it.flushed("t")
        assert await it.stored() == [0, 1, 2]

    log = Replicated()
    bench(lambda it: main(it, log), server=log)
