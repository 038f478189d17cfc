"""What a restore does with a thread's entries, however they came to be, without Spark."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.chain import Watermark
from bufstore.buffer.entry import Base, Item, Malformed, StoredEntry, encode
from bufstore.jetstream.messages import Outgoing
from bufstore.spark.log_archive.applicable import applicable
from bufstore.spark.log_archive.into_log import Wanted, wanted
from bufstore.spark.log_archive.into_postgres import decided
from thorough import examples
from unit.fake_log import run
from unit.write_world import SUBJECTS, Instance, World

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("append", "whole", "flush", "flush and purge")),
        st.integers(0, 1),  # which process
        st.lists(st.integers(0, 3), max_size=3),
    ),
    min_size=1,
    max_size=12,
)


async def history(operations: list[tuple[str, int, list[int]]]) -> tuple[list[Item], list[Any]]:
    """A thread's entries, as an archive has them, and the messages that they come to."""
    world = World()
    processes = [Instance(world), Instance(world)]
    archive: dict[int, Item] = {}
    for kind, process, messages in operations:
        if kind == "append":
            await processes[process].append(messages)
        elif kind == "whole":
            await processes[process].checkpoint(messages)
        archive |= {item.seq: item for item in world.tail("t")}
        if kind.startswith("flush"):
            await (world.flush() if kind == "flush" else world.flush_and_purge())
            await asyncio.sleep(world.config.log.failover_window_s)  # as it takes
    shown = await world.messages()
    for process in processes:
        await process.aclose()
    return list(archive.values()), shown


def there(world: World) -> list[int]:
    return [item.entry.id for item in world.tail("t") if isinstance(item, StoredEntry)]


async def bring_back(world: World, items: list[Item], count: int = 1000) -> Wanted:
    """Into the log of `world`; at most `count` entries, then it is stopped."""
    version = len(await world.store.load_messages("t") or [])
    found = wanted("t", await world.ledger.watermark("t"), version, there(world), items, world.log.last_seq + 1)
    for entry in found.entries[:count]:
        header, body = encode(entry, 1 << 20)[0]
        world.log.store([Outgoing(SUBJECTS.of("t"), body, header)])
    return found


@examples(200)
@given(
    operations=OPERATIONS,
    parts=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 4), st.sampled_from(("", "flush", "purge"))), max_size=4
    ),
)
def test_a_thread_in_parts_and_again_is_as_it_was(
    operations: list[tuple[str, int, list[int]]], parts: list[tuple[int, int, str]]
) -> None:
    async def main() -> None:
        items, shown = await history(operations)
        world = World()
        # Positions in another log are higher, as its generation sees to.
        for _ in range(100):
            world.log.intrude("thread.0.elsewhere")
        archived = 0
        for more, count, then in parts:  # archived since; stopped after so many; what the flushers do meanwhile
            archived += more
            if items[:archived]:
                assert not (await bring_back(world, items[:archived], count)).reason
            if then == "flush":
                await world.flush()
            elif then == "purge":
                await world.flush_and_purge()
        if items:
            assert not (await bring_back(world, items)).reason
            again = await bring_back(world, items)
            assert (again.entries, again.present) == ([], len(items))
        assert await world.messages() == shown
        await world.flush()
        assert await world.store.load_messages("t") == (shown if items else None)
        assert world.ledger.parked.entries == {}

    run(main())


def test_a_thread_that_went_on_is_left_alone() -> None:
    async def main() -> None:
        items, _ = await history([("append", 0, [1]), ("append", 0, [2])])
        world = World()
        one = Instance(world)
        await bring_back(world, items[:1])
        await one.append(["mine"])
        found = await bring_back(world, items)
        assert (found.entries, found.refused) == ([], 2)
        assert "see the log" in found.reason
        await world.flush_and_purge()
        assert "see Postgres" in (await bring_back(world, items)).reason
        assert await world.messages() == [1, "mine"]
        await one.aclose()

    run(main())


def test_what_is_broken_or_ahead_is_refused() -> None:
    items = asyncio.run(history([("append", 0, [1])]))[0]
    (item,) = items
    assert isinstance(item, StoredEntry)
    broken = wanted("t", Watermark(flushed_seq=9, applied_id=3, broken_since=9), 0, [], items, 50)
    ahead = wanted("t", Watermark(flushed_seq=90, applied_id=item.entry.id), 1, [], [*items, *items], 50)
    assert ("quarantine" in broken.reason, broken.entries) == (True, [])
    assert ahead.entries == []


@pytest.mark.parametrize("cause", ["malformed", "hole"])
def test_up_to_what_cannot_be_applied(cause: str) -> None:
    items = asyncio.run(history([("append", 0, [n]) for n in range(4)]))[0]
    if cause == "hole":
        del items[2]
    else:
        items[2] = Malformed("thread.x", items[2].seq, (), "checksum mismatch", "t")
    found = wanted("t", Watermark(), 0, [], items, 50)
    assert (len(found.entries), found.refused) == (2, len(items) - 2)
    assert f"position {items[2].seq}" in found.reason
    decision, counts = decided({"t": Watermark()}, {}, {"t": items})
    assert (counts.applied, counts.refused, len(decision.batch)) == (2, len(items) - 2, 1)


def test_messages_that_were_there_before_the_log_are_missed() -> None:
    """Its first entry keeps two messages that no archive has."""
    items = asyncio.run(history([("whole", 0, [1, 2]), ("append", 0, [3])]))[0][1:]
    (item,) = items
    assert isinstance(item, StoredEntry)
    first = StoredEntry("t", item.seq, msgspec.structs.replace(item.entry, base=Base.NONE, prev_id=0))
    assert "before the log" in applicable("t", Watermark(), 0, [first]).reason
    assert "before the log" in wanted("t", Watermark(), 1, [], [first], 50).reason
    assert applicable("t", Watermark(), 2, [first]).reason == ""
