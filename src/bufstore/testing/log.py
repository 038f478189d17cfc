"""The conformance suite of logs: one check per promise of `bufstore.buffer.ports.log.Log`, but for its feeds.

Each takes a `Logs` of its own: names on a server that nothing else uses. What only a replicated log does (a leader that
is old) is not checked here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bufstore.buffer.entry import entry_id
from bufstore.buffer.ports.log import Floor, GroupSizes, Log, Writes
from bufstore.buffer.ports.shared_state import Session
from bufstore.buffer.subjects import Subjects, first_position
from bufstore.buffer.target import Target
from bufstore.buffer.windows import Windows
from bufstore.config import BufferConfig
from bufstore.errors import LogFull, LogRolledBack, LogUnavailable, Unavailable
from bufstore.jetstream.messages import Conflict, Outgoing, StoredMessage
from bufstore.testing.basics import Check, raises, registrar

CHECKS: list[Check] = []
_check = registrar(CHECKS)

_EPOCH = 2
_HERE, _ELSEWHERE = Target("counters", "table", "a"), Target("counters", "table", "b")
#: The first position of the logs that are made here.
FIRST = first_position(_EPOCH)
#: How long a call or an event may take.
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Logs:
    """What the checks are run against."""

    #: How the log is configured: four partitions, and ``max_bytes`` of a few MiB, which the checks fill.
    config: BufferConfig
    #: Opens the session of one more instance. The check's caller closes the sessions.
    open: Callable[[], Awaitable[Session]]

    @property
    def subjects(self) -> Subjects:
        """The log's subjects."""
        return Subjects(self.config.log.subject, self.config.log.partitions)

    async def made(self) -> Log:
        """Open one more instance; return its log, which exists and whose epoch the instance has read."""
        session = await self.open()
        await session.shared.setup()
        log = session.log
        if await log.epoch(checked=False) is None:
            await log.create(_EPOCH, _HERE)
        assert await log.epoch() == _EPOCH
        return log

    def threads(self, partition: int, count: int = 1) -> list[str]:
        """Return the subjects of `count` threads of a partition."""
        found = (f"thread {i}" for i in range(1000))
        return [self.subjects.of(t) for t in found if self.subjects.partition(t) == partition][:count]


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    """Return when `check` gives True; fail with TimeoutError when it does not in time."""
    async with asyncio.timeout(PATIENCE_S):
        while not await check():  # noqa: ASYNC110 - another instance decides it
            await asyncio.sleep(0.01)


async def put(log: Log, *subjects: str, body: bytes = b"x") -> list[int]:
    """Publish one entry on each of the subjects, one after the other; return the positions."""
    return [await log.publish(Outgoing(subject, body), PATIENCE_S) for subject in subjects]


# Generations


@_check()
async def a_log_is_made_once(logs: Logs) -> None:
    here, there = (await logs.open()).log, (await logs.open()).log
    assert await here.epoch() is None
    await here.create(_EPOCH, _HERE)
    await there.create(_EPOCH + 1, _ELSEWHERE)
    for log in (here, there):
        assert await log.epoch() == _EPOCH
        assert log.target == _HERE
        assert log.generation_start == FIRST


@_check()
async def positions_begin_with_the_generation_and_grow(logs: Logs) -> None:
    log, other = await logs.made(), await logs.made()
    assert await log.bounds() == (FIRST, FIRST - 1)
    assert await log.end(PATIENCE_S) == FIRST - 1
    (a,) = logs.threads(0)
    places = await put(log, a, *logs.threads(1), a) + await put(other, a) + await put(log, a)
    assert places[0] >= FIRST
    assert places == sorted({*places})
    first, end = await log.bounds()
    assert FIRST <= first <= places[0]
    assert places[-1] <= end == await log.end(PATIENCE_S)


@_check()
async def a_log_out_of_service_can_be_read_and_not_written(logs: Logs) -> None:
    log, other = await logs.made(), await logs.made()
    (a,) = logs.threads(0)
    places = await put(log, a)
    assert list(await log.withdraw([FIRST, 0, 0, 0])) == [FIRST, 0, 0, 0]
    # The positions of the first withdrawal stand.
    assert list(await other.withdraw([0, 0, 0, 0])) == [FIRST, 0, 0, 0]
    with raises(LogUnavailable):
        await put(other, a)
    with raises(LogRolledBack):
        await other.epoch()
    assert await other.epoch(checked=False) == _EPOCH
    assert [m.seq for m in await log.after(a, 0)] == places


@_check()
async def a_log_out_of_service_is_removed_with_all_that_is_in_it(logs: Logs) -> None:
    log = await logs.made()
    (a,) = logs.threads(0)
    await put(log, a)
    await log.remove()
    assert await log.epoch() == _EPOCH, "it is in service"
    await log.withdraw([0, 0, 0, 0])
    await log.remove()
    await log.remove()
    assert await log.epoch() is None
    with raises(LogUnavailable):
        await put(log, a)


@_check()
async def windows_that_one_sets_another_reads(logs: Logs) -> None:
    here, there = await logs.made(), await logs.made()
    assert here.windows == Windows.of(logs.config.log)
    changed = here.windows.changed(failover_window_s=here.windows.failover_window_s + 1)
    await here.set_windows(changed)
    await there.epoch()
    assert there.windows == changed
    await there.set_windows(changed.settled())
    await here.end(PATIENCE_S)
    assert here.windows == changed.settled()


@_check()
async def a_log_that_is_refused_is_written_no_more(logs: Logs) -> None:
    log, other = await logs.made(), await logs.made()
    (a,) = logs.threads(0)
    before, why = log.refused, LogRolledBack("it is another one", "open the right one")
    log.refuse(why)
    assert (before, log.refused) == (None, why)
    message = Outgoing(a, b"x")
    for call in (
        log.publish(message, PATIENCE_S),
        log.publish_batch([message, message], PATIENCE_S),
        log.end(PATIENCE_S),
    ):
        with raises(LogRolledBack):
            await call
    # The refusal concerns only the instance that refused the log.
    (at,) = await put(other, a)
    assert (await other.last([a]))[a].seq == at


@_check()
async def a_session_that_is_closed_says_so(logs: Logs) -> None:
    await logs.made()
    session = await logs.open()
    assert await session.log.epoch() == _EPOCH
    await session.aclose()
    for call in (put(session.log, *logs.threads(0)), session.log.last(logs.threads(0))):
        with raises(Unavailable):
            await call


# Writing


@_check()
async def what_is_stored_comes_back_as_it_was(logs: Logs) -> None:
    log, other = await logs.made(), await logs.made()
    a, b = logs.threads(0, 2)
    one = await log.publish(Outgoing(a, b"\0body", "1.header"), PATIENCE_S)
    two = await log.publish(Outgoing(b, b""), PATIENCE_S)
    stored = [StoredMessage(a, one, "1.header", b"\0body"), StoredMessage(b, two, None, b"")]
    assert await other.last([a, b]) == {a: stored[0], b: stored[1]}
    assert [m async for _, m in other.scan()] == stored
    assert [await other.identity(at) for at in (one, two, two + 1)] == [*stored, None]
    assert log.trouble == "", "a write was answered"


@_check()
async def an_entry_of_any_size_comes_back_as_it_was(logs: Logs) -> None:
    log, other = await logs.made(), await logs.made()
    a, b = logs.threads(0, 2)
    bodies = [bytes([n]) * (700_000 * n) for n in (1, 2)]
    unit = [Outgoing(a, bodies[0], "1.a", 0), Outgoing(a, bodies[1], "1.b"), Outgoing(a, b"", "1.c")]
    end = await log.publish_batch(unit, PATIENCE_S)
    (behind,) = await put(other, b)
    assert end < behind
    assert [m.body for m in await other.after(a, 0)] == [*bodies, b""]
    assert (await other.identity(end)) == StoredMessage(a, end, "1.c", b"")


@_check()
async def a_write_that_expects_something_else_stores_nothing(logs: Logs) -> None:
    log = await logs.made()
    a, b = logs.threads(0, 2)
    one = await log.publish(Outgoing(a, b"x", expected=0), PATIENCE_S)
    two = await log.publish(Outgoing(a, b"x", expected=one), PATIENCE_S)
    (of_b,) = await put(log, b)
    # The expectation is about the thread's last entry, not the log's.
    for wrong in (0, one, of_b, two + 1):
        with raises(Conflict):
            await log.publish(Outgoing(a, b"x", expected=wrong), PATIENCE_S)
    three = await log.publish(Outgoing(a, b"x", expected=two), PATIENCE_S)
    assert [m.seq for m in await log.after(a, 0)] == [one, two, three]


@_check()
async def of_writes_that_expect_the_same_one_is_stored(logs: Logs) -> None:
    instances = [await logs.made() for _ in range(3)]
    (a,) = logs.threads(0)
    writes = (log.publish(Outgoing(a, b"x", expected=0), PATIENCE_S) for log in instances)
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert sorted(type(o).__name__ for o in outcomes) == ["Conflict", "Conflict", "int"]


@_check()
async def a_batch_is_stored_whole_and_as_neighbours(logs: Logs) -> None:
    log, other = await logs.made(), await logs.made()
    a, b = logs.threads(0, 2)
    batch = [Outgoing(a, b"1", expected=0), Outgoing(b, b"2", "h", expected=0), Outgoing(b, b"3")]
    (end, *_) = await asyncio.gather(log.publish_batch(batch, PATIENCE_S), put(other, *logs.threads(1, 5)))
    stored = [m async for _, m in log.scan(partitions=[0])]
    assert [(m.subject, m.seq, m.header, m.body) for m in stored] == [
        (a, end - 2, None, b"1"), (b, end - 1, "h", b"2"), (b, end, None, b"3"),
    ]  # fmt: skip


@_check()
async def a_batch_with_one_conflict_stores_nothing(logs: Logs) -> None:
    log = await logs.made()
    a, b = logs.threads(0, 2)
    await put(log, b)
    end = await log.end(PATIENCE_S)
    with raises(Conflict):
        await log.publish_batch([Outgoing(a, b"1", expected=0), Outgoing(b, b"2", expected=0)], PATIENCE_S)
    assert await log.end(PATIENCE_S) == end
    assert await log.last([a]) == {}


@_check()
async def a_full_log_takes_nothing_until_there_is_room(logs: Logs) -> None:
    log = await logs.made()
    (a,), size = logs.threads(0), 100_000
    used, limit = await log.fill()
    assert limit == logs.config.log.max_bytes
    for _ in range(limit // size):
        if (await log.fill())[0] + 2 * size > limit:
            break
        await put(log, a, body=bytes(size))
    end = await log.end(PATIENCE_S)
    with raises(LogFull):
        await log.publish_batch([Outgoing(a, bytes(size))] * 3, PATIENCE_S)
    with raises(LogFull):
        await put(log, a, body=bytes(3 * size))
    assert await log.end(PATIENCE_S) == end
    assert used < (await log.fill())[0] <= limit
    await _let_go(log, logs, end)
    (at,) = await put(log, a, body=bytes(3 * size))
    assert at > end


async def _let_go(log: Log, logs: Logs, below: int) -> None:
    """Say for all partitions that nothing below this position is needed any more, until all of that is gone."""

    async def gone() -> bool:
        return await log.let_go(dict.fromkeys(range(logs.config.log.partitions), Floor(below, below))) > 0

    await eventually(gone)


# Reading


@_check()
async def the_last_message_of_each_subject_is_found(logs: Logs) -> None:
    log = await logs.made()
    (a, b), (c,) = logs.threads(0, 2), logs.threads(1)
    places = await put(log, a, b, a, c)
    assert {s: m.seq for s, m in (await log.last([a, *logs.threads(2)])).items()} == {a: places[2]}
    assert await log.ends([a, b, c, *logs.threads(2)]) == [places[2], places[1], places[3], 0]
    assert await log.partition_ends() == [places[2], places[3], 0, 0]
    assert await log.latest_partition_ends(PATIENCE_S) == [places[2], places[3], 0, 0]
    assert [await log.latest(s, PATIENCE_S) for s in (a, *logs.threads(2))] == [places[2], 0]


@_check()
async def who_comes_to_a_backlog_finds_where_its_partitions_end(logs: Logs) -> None:
    log = await logs.made()
    (quiet,), (a, b), (c,) = logs.threads(0), logs.threads(1, 2), logs.threads(2)
    (first,) = await put(log, quiet)
    places = [await put(log, a, b, c) for _ in range(30)][-1]
    new = await logs.made()
    assert await new.latest_partition_ends(PATIENCE_S) == [first, *places[1:], 0]
    (last,) = await put(log, *logs.threads(3))
    new = await logs.made()
    assert await new.latest_partition_ends(PATIENCE_S) == [first, *places[1:], last]
    assert await new.partition_ends() == [first, *places[1:], last]
    assert await new.ends([a, quiet]) == [places[0], first]


@_check()
async def messages_above_a_position_come_in_order(logs: Logs) -> None:
    log = await logs.made()
    (a, b), (c,) = logs.threads(0, 2), logs.threads(1)
    places = await put(log, a, b, a, c, a)
    for seq, limit, found in (
        (0, 0, [0, 2, 4]),
        (places[0], 0, [2, 4]),
        (places[0], 1, [2]),
        (places[4], 0, []),
    ):
        messages = await log.after(a, seq, limit)
        assert [m.seq for m in messages] == [places[n] for n in found]


@_check()
async def a_scan_shows_every_entry_or_those_of_some(logs: Logs) -> None:
    log = await logs.made()
    (a, b), (c,) = logs.threads(0, 2), logs.threads(1)
    places = await put(log, a, b, c, a, b)
    thread = logs.subjects.thread_id
    for asked, found in (
        ({}, [0, 1, 2, 3, 4]),
        ({"above": places[1]}, [2, 3, 4]),
        ({"partitions": [1]}, [2]),
        ({"threads": [thread(a), thread(c)]}, [0, 2, 3]),
        ({"threads": [thread(a)], "above": places[0]}, [3]),
        ({"last_up_to": places[4]}, [2, 3, 4]),
        ({"last_up_to": places[3]}, [1, 2, 3, 4]),
    ):
        await log.partition_ends()
        scanned = [(partition, message) async for partition, message in log.scan(**asked)]
        assert [message.seq for _, message in scanned] == [places[i] for i in found], asked
        assert [partition for partition, _ in scanned] == [int(i == 2) for i in found]
    sizes = await log.last_groups()
    assert (sizes, sizes.bytes > 0) == (GroupSizes(5, 5, sizes.bytes), True)
    assert log.writes == Writes(5, 0)


@_check()
async def what_a_log_holds_is_counted_by_partition(logs: Logs) -> None:
    log = await logs.made()
    (a,), (b,) = logs.threads(0), logs.threads(1)
    places = await put(log, a, b, a, b, b)
    held = await log.held({0: places[0], 1: places[3]})
    assert (held.above, held.seen) == ({0: 1, 1: 1}, 5)
    assert (held.bytes, held.limit) == await log.fill()
    assert (await log.held({})).above == {0: 2, 1: 3}


# Removing


@_check()
async def the_log_is_purged_as_far_as_all_partitions_allow(logs: Logs) -> None:
    log, other = await logs.made(), await logs.made()
    (a, b), (c,) = logs.threads(0, 2), logs.threads(1)
    places = await put(log, a, b, c, b)
    all_, half = range(logs.config.log.partitions), logs.config.log.partitions // 2
    assert await log.let_go({p: Floor(places[3], places[3]) for p in all_[:half]}) == 0
    assert (await log.identity(places[0])) is not None
    assert await log.purged_to() == 0
    # The floor that one owner gives counts for all instances; the lowest floor decides.
    purged = 0

    async def gone() -> bool:
        nonlocal purged
        purged = await other.let_go({p: Floor(places[3], places[2]) for p in all_[half:]})
        return purged > 0

    await eventually(gone)
    assert places[1] < purged <= places[2]
    third = await logs.made()
    assert (await third.bounds())[0] > places[1]
    assert places[1] < await third.purged_to() <= places[2]
    assert [await third.identity(at) is not None for at in places] == [False, False, True, True]
    assert [m.seq async for _, m in third.scan()] == places[2:]
    # An entry that leaves takes nothing else with it, and a thread without entries is like one that never had any.
    assert a not in await third.last([a, b, c])
    assert (await third.last([b]))[b].seq == places[3]
    assert await third.publish(Outgoing(a, b"x", expected=0), PATIENCE_S) > places[3]


@_check()
async def nobody_builds_on_what_was_let_go_of_behind_a_fence(logs: Logs) -> None:
    log, other = await logs.made(), await logs.made()
    a, b = logs.threads(0, 2)
    places = await put(log, a, b)
    assert (await other.last([a]))[a].seq == places[0]
    await log.fence(places[0] + 1)
    await log.fence(places[0] + 1)
    with raises(Conflict):
        await other.publish(Outgoing(a, b"x", expected=places[0]), PATIENCE_S)
    assert await other.publish(Outgoing(b, b"x", expected=places[1]), PATIENCE_S) > places[1]


@_check()
async def a_cursor_may_pass_a_group_without_entries_and_finds_it_again(logs: Logs) -> None:
    """Otherwise what stands before the group could not be purged until somebody writes."""
    log, other = await logs.made(), await logs.made()
    places = await put(log, *logs.threads(0, 2))
    feed = await other.feed(0, places[0], lambda: None)
    await log.fence(places[0] + 1)

    async def passed() -> bool:
        feed.take()
        return feed.through is not None and feed.through.seq > places[1]

    await eventually(passed)
    assert feed.through is not None
    assert await log.identity(feed.through.seq) == feed.through
    assert entry_id(feed.through)
    assert await log.identity(feed.through.seq + 1) is None
    await feed.close()


@_check()
async def positions_go_on_when_everything_was_let_go_of(logs: Logs) -> None:
    log = await logs.made()
    (a,) = logs.threads(0)
    places = await put(log, a, a)
    end = await log.end(PATIENCE_S)
    await _let_go(log, logs, end + 1)
    (at,) = await put(log, a)
    assert at > end >= places[-1]


async def _settle(log: Log, logs: Logs, below: int) -> None:
    """Say that nothing below this position is needed any more, and wait until that is settled."""

    async def settled() -> bool:
        return await log.settled() >= below

    await log.let_go({p: Floor(below, 0) for p in range(logs.config.log.partitions)})
    await eventually(settled)


@_check()
async def an_erasure_removes_what_a_thread_has_in_the_log(logs: Logs) -> None:
    log = await logs.made()
    a, b = logs.threads(0, 2)
    places = await put(log, *[a, b] * 20)
    gone, stays = logs.subjects.thread_id(a), logs.subjects.thread_id(b)
    remains = await log.remains({gone: places[-2]})
    assert (remains.entries, remains.ends_log) == (19, False)
    with raises(LogUnavailable):  # nobody has said that these entries are no longer needed
        await log.erase(remains)
    await _settle(log, logs, remains.settled_from)
    for _ in range(2):  # an erasure may be repeated
        await log.erase(remains)
    assert [m.seq async for _, m in log.scan(threads=[gone])] == [places[-2]]
    assert [m.seq async for _, m in log.scan(threads=[stays])] == places[1::2]
    assert places[-4] <= await log.erased() < remains.settled_from
    assert (await log.remains({gone: places[-2]})).entries == 0
    assert (await log.remains({stays: places[-1] + 1})).ends_log


@_check()
async def every_instance_knows_up_to_where_was_erased(logs: Logs) -> None:
    log, other = await logs.made(), await logs.made()
    (a,) = logs.threads(0)
    places = await put(log, a, a, a)
    assert await log.erased() == 0
    remains = await log.remains({logs.subjects.thread_id(a): places[2]})
    await _settle(log, logs, remains.settled_from)
    await log.erase(remains)
    assert places[1] <= await log.erased() == await other.erased() < places[2]
