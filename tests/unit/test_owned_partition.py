"""An owner's memory of a partition: the cursor never passes an entry that is not settled."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.entry import Base, Entry, encode
from bufstore.buffer.flush import owned_partition
from bufstore.buffer.flush.owned_partition import OwnedPartition
from bufstore.buffer.ports.ledger import Cursor
from bufstore.buffer.subjects import Subjects
from bufstore.jetstream.messages import StoredMessage
from thorough import examples

SUBJECTS = Subjects("thread", 1)


class FakeFeed:
    lost = None

    def __init__(self) -> None:
        self.arrived: list[StoredMessage] = []

    def take(self) -> list[StoredMessage]:
        taken, self.arrived = self.arrived, []
        return taken

    async def more(self) -> None: ...

    def passed(self, seq: int) -> None: ...

    async def ack(self, seq: int) -> None: ...

    async def close(self) -> None: ...


def messages(sizes: list[int], first: int = 1) -> tuple[list[StoredMessage], list[int]]:
    """One entry for each size, and their positions. Size 0 makes a malformed entry."""
    made: list[StoredMessage] = []
    ends = []
    for n, size in enumerate(sizes):
        entry = Entry(
            id=n + 1, prev_id=0, base=Base.CHAINED, seen=0, version=0, self_contained=True, keys=b"",
            payload=b"x" * (10 * size),
        )  # fmt: skip
        header, body = encode(entry) if size else ("junk", b"")
        made.append(StoredMessage(SUBJECTS.of("t"), first + len(made), header, body))
        ends.append(made[-1].seq)
    return made, ends


def new_share(feed: FakeFeed, seq: int = 0) -> OwnedPartition:
    return OwnedPartition(Cursor(0, 1, seq, 0), feed, SUBJECTS)


def settle(owned: OwnedPartition, settled: set[int], now: float = 0.0) -> None:
    owned.settle(settled, owned.cursor_after(settled), now)


@examples(150)
@given(
    sizes=st.lists(st.integers(0, 3), max_size=10),
    rounds=st.lists(st.tuples(st.integers(0, 6), st.sets(st.integers(0, 9), max_size=5)), max_size=10),
    slack=st.sampled_from([0, 1000]),
)
def test_the_cursor_stands_before_the_first_entry_that_is_not_settled(
    sizes: list[int], rounds: list[tuple[int, set[int]]], slack: int
) -> None:
    # Without slack, positions on which the cursor will never stand are forgotten as soon as they outnumber the others.
    with mock.patch.object(owned_partition, "_ORDER_SLACK", slack):
        _the_cursor_stands_before_the_first_open_entry(sizes, rounds)


def _the_cursor_stands_before_the_first_open_entry(sizes: list[int], rounds: list[tuple[int, set[int]]]) -> None:
    feed = FakeFeed()
    owned = new_share(feed)
    made, ends = messages(sizes)
    done: set[int] = set()
    for count, picked in [*rounds, (len(made), set(range(10)))]:
        feed.arrived, made = made[:count], made[count:]
        owned.collect()
        chosen = {end for n, end in enumerate(ends) if n in picked and end in owned.pending}
        settle(owned, chosen)
        done |= chosen
        arrived = [end for end in ends if end in done or end in owned.pending]
        first_open = next((end for end in arrived if end not in done), None)
        assert owned.cursor.seq == max((e for e in arrived if first_open is None or e < first_open), default=0)
        assert all(end in done for end in ends if end <= owned.cursor.seq), "the cursor passed an unsettled entry"
        if owned.cursor.seq:
            n = ends.index(owned.cursor.seq)
            assert owned.cursor.id == (n + 1 if sizes[n] else 0)
    assert owned.cursor.seq == (ends[-1] if ends else 0)
    assert owned.pending_bytes == 0


def test_the_cursor_names_the_entry_it_stands_on() -> None:
    feed = FakeFeed()
    owned = new_share(feed)
    feed.arrived, ends = messages([1, 2, 0, 1])
    owned.collect()
    settle(owned, set(ends[:2]))
    assert (owned.cursor.seq, owned.cursor.id) == (ends[1], 2)
    settle(owned, {ends[2]})
    assert (owned.cursor.seq, owned.cursor.id) == (ends[2], 0), "what is no entry has no id"


def test_an_entry_settled_ahead_of_an_open_one_is_passed_once_that_is_settled() -> None:
    feed = FakeFeed()
    owned = new_share(feed)
    feed.arrived, _ = messages([1, 1, 1])
    owned.collect()
    settle(owned, {2, 3})
    assert owned.cursor.seq == 0
    settle(owned, {1})
    assert (owned.cursor.seq, owned.cursor.id) == (3, 3)


def test_after_an_error_in_what_arrived_the_partition_is_not_relied_on() -> None:
    feed = FakeFeed()
    owned = OwnedPartition(Cursor(0, 1, 0, 0), feed, SUBJECTS)
    feed.arrived = [StoredMessage(None, 1, None, b"")]  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        owned.collect()
    assert owned.doubt is not None, "else the cursor would pass what was lost"


def test_after_an_interrupt_while_something_is_taken_the_partition_is_not_relied_on() -> None:
    class Interrupted(FakeFeed):
        def take(self) -> list[StoredMessage]:
            raise KeyboardInterrupt

    owned = new_share(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        owned.collect()
    assert owned.doubt is not None, "else the cursor would pass what was lost"
