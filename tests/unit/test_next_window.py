"""Which entries make a window: no partition waits for the others, however many entries they have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.entry import Base, Entry, encode
from bufstore.buffer.flush.next_window import gather
from bufstore.buffer.flush.owned_partition import OwnedPartition, Queued
from bufstore.buffer.ports.ledger import Cursor
from bufstore.buffer.subjects import Subjects
from bufstore.jetstream.messages import StoredMessage
from thorough import examples
from unit.test_owned_partition import FakeFeed, settle

SUBJECTS = Subjects("thread", 1)


class Log:
    """Entries of some partitions, each with a feed."""

    def __init__(self, partitions: int) -> None:
        self.end = 0
        self._feeds = [FakeFeed() for _ in range(partitions)]
        self.owned = [OwnedPartition(Cursor(n, 1, 0, 0), feed, SUBJECTS) for n, feed in enumerate(self._feeds)]

    def deliver(self, partition: int, thread_id: str) -> None:
        self.end += 1
        header, body = encode(
            Entry(
                id=self.end, prev_id=0, base=Base.CHAINED, seen=0, version=0, self_contained=True, keys=b"", payload=b""
            )
        )
        self._feeds[partition].arrived.append(StoredMessage(SUBJECTS.of(thread_id), self.end, header, body))
        self.owned[partition].collect()

    def flush(self, room: int, waiting: frozenset[str | None] = frozenset()) -> set[int]:
        """Settle the next window. Returns its positions."""
        threads = gather(self.owned, lambda thread_id: thread_id not in waiting, room)
        found = {item.seq for items in threads.values() for item in items}
        for owned in self.owned:
            settle(owned, found & owned.pending.keys())
        return found


def test_no_partition_waits_for_the_backlog_of_another() -> None:
    log = Log(2)
    for _ in range(30):
        log.deliver(0, "backlog")
    for _ in range(3):
        for _ in range(4):
            log.deliver(1, "live")
        flushed = log.flush(10)
        assert len(flushed) == 10, "the room that the other one leaves is used"
        assert not log.owned[1].pending, "what others have from before does not count"


def test_what_waits_gives_its_partition_no_turn() -> None:
    log = Log(2)
    log.deliver(0, "waits")
    for _ in range(2):
        log.deliver(1, "other")
        for _ in range(10):
            log.deliver(0, "many")
    assert 2 in log.flush(10, waiting=frozenset({"waits"}))


def test_nothing_is_flushed_past_what_waits_in_the_ledger() -> None:
    log = Log(1)
    log.deliver(0, "queued")
    log.deliver(0, "other")
    log.owned[0].queues["queued"] = Queued(1, 1, "a lock")
    assert log.flush(10) == {2}


@examples(200)
@given(
    arrivals=st.lists(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abcd")), max_size=12), max_size=8),
    room=st.integers(1, 8),
    waiting=st.sets(st.sampled_from("ab")),
)
def test_a_window_is_full_and_has_the_oldest_entry(
    arrivals: list[list[tuple[int, str]]], room: int, waiting: set[str]
) -> None:
    log = Log(4)
    for some in arrivals:
        for partition, thread in some:
            log.deliver(partition, f"{thread}{partition}")
        held = frozenset(f"{thread}{partition}" for thread in waiting for partition in range(4))
        entries = {seq: item for owned in log.owned for seq, item in owned.pending.items()}
        ready = sorted(seq for seq, item in entries.items() if item.thread_id not in held)
        flushed = log.flush(room, held)
        assert len(flushed) == min(room, len(ready))
        assert flushed <= set(ready)
        assert not ready or ready[0] in flushed
        for seq in flushed:  # in order, within each thread
            before = [s for s in ready if s < seq and entries[s].thread_id == entries[seq].thread_id]
            assert set(before) <= flushed
