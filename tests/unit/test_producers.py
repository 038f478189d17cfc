"""The highest number per source: a repeat is recognized after any other writes; bounded, and in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import InvalidId, InvalidRecord, ProducerSequence
from bufstore.buffer import producers
from bufstore.buffer.entry import Base, Entry, decode, encode
from bufstore.jetstream.messages import StoredMessage
from bufstore.types import check_producer

WRITES = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 2**63 - 1)), max_size=30)


def after(writes: list[tuple[str, int]]) -> bytes:
    known = b""
    for name, number in writes:
        if not producers.holds(known, producers.item(name, number)):
            known = producers.add(known, producers.item(name, number))
    return known


@given(writes=WRITES, name=st.sampled_from("abcdefghi"), number=st.integers(0, 2**63 - 1))
def test_a_number_is_a_repeat_if_one_as_high_was_written(writes: list[tuple[str, int]], name: str, number: int) -> None:
    highest = max((n for s, n in writes if s == name), default=-1)
    assert producers.holds(after(writes), producers.item(name, number)) == (number <= highest)
    assert producers.highest(after(writes), name) == max(highest, 0)


@given(older=WRITES, newer=WRITES)
def test_merged_are_the_highest_of_both(older: list[tuple[str, int]], newer: list[tuple[str, int]]) -> None:
    merged = producers.merge(after(older), after(newer))
    for name in "abcdefgh":
        highest = max((n for s, n in older + newer if s == name), default=-1)
        if highest >= 0:
            assert producers.holds(merged, producers.item(name, highest))
        if highest < 2**63 - 1:
            assert not producers.holds(merged, producers.item(name, highest + 1))


def test_the_ninth_source_displaces_the_one_that_has_not_written_for_the_longest() -> None:
    known = after([(name, 5) for name in "abcdefgh"] + [("a", 6)])
    known = producers.add(known, producers.item("i", 1))
    assert len(known) == 16 * producers.SIZE
    assert not producers.holds(known, producers.item("b", 5))
    assert all(producers.holds(known, producers.item(n, 5)) for n in "acdefgh")


@given(writes=WRITES)
def test_an_entry_carries_them_and_without_any_is_not_longer(writes: list[tuple[str, int]]) -> None:
    known = after(writes)

    def entry(marks: bytes | None) -> Entry:
        return Entry(
            id=1, prev_id=2, base=Base.CHAINED, seen=0, version=1, self_contained=False, keys=b"r" * 192,
            producers=marks, payload=b"p",
        )  # fmt: skip

    header, body = encode(entry(known))
    assert decode(StoredMessage("s", 1, header, body)).producers == (known or None)
    assert encode(entry(b"")) == encode(entry(None))
    assert len(header) < 600, "with all headers it stays below what is reckoned for them"


@pytest.mark.parametrize(
    "bad",
    [ProducerSequence("", 1), ProducerSequence("a\0", 1), ProducerSequence("a", -1), ProducerSequence("a", 2**63)],
)
def test_a_mark_that_cannot_be_kept_is_refused(bad: ProducerSequence) -> None:
    with pytest.raises((InvalidId, InvalidRecord)):
        check_producer(bad)


def test_a_key_and_a_source_exclude_each_other() -> None:
    check_producer(ProducerSequence("a", 0))
    with pytest.raises(InvalidRecord):
        check_producer(ProducerSequence("a", 0), "key")
    with pytest.raises(InvalidRecord):
        check_producer(("a", 0))
