"""Which writes go out together: nothing is lost, overtaken, sent twice or refused too early."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer import producers, recent_keys
from bufstore.buffer.append import next_unit as module
from bufstore.buffer.append.next_unit import Drafted, Limits, Need, NotTried, Taken, needs, next_unit
from bufstore.buffer.append.tip import Draft, NeedBase, NeedVersion, Tip
from bufstore.buffer.entry import Base, StoredEntry, items_of
from bufstore.errors import AlreadyExists, IdempotencyConflict, TooLarge
from bufstore.jetstream.messages import Outgoing, StoredMessage
from bufstore.types import Receipt

#: The most bytes of payload in a unit.
UNIT_BYTES = 40
LIMITS = Limits(100, UNIT_BYTES)
UNIT_ENTRIES = 8


@pytest.fixture(autouse=True, scope="module")
def small_units() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "size_of", lambda message: len(message.body))
        patch.setattr(module, "ENTRIES_MAX", UNIT_ENTRIES)
        yield


class Content:
    """A thread's content: the ids of the writes that were drafted onto it."""

    weight = 1

    def __init__(self) -> None:
        self.drafted: list[int] = []


@dataclass(eq=False)
class Waits:
    """A write, and what its `prepare` does."""

    id: int
    does: str = "drafts"
    size: int = 1
    item: bytes = b""
    keyed: bool = False
    mark: bytes | None = None
    after: Waits | None = None
    ended: bool = False
    failed: bool = False
    content: Content = field(default_factory=Content)

    def __post_init__(self) -> None:
        self.item = self.item or recent_keys.item_of(self.id)

    def prepare(self, tip: Tip[Content]) -> Draft[Content]:
        match self.does:
            case "needs the content" if tip.memory is None:
                raise NeedBase
            case "needs the version" | "is refused for the version" if tip.memory is None and not tip.judged:
                raise NeedVersion
            case "is refused for the version":
                raise AlreadyExists("it is there")
            case "needs an entry or the content" if tip.memory is None and not tip.seq:
                raise NeedBase
            case "is refused":
                raise AlreadyExists("it is there")
            case "breaks":
                raise ZeroDivisionError
        self.content.drafted.append(self.id)
        return Draft(b"x" * self.size, True, tip.version + 1, self.content, self._undo)

    def _undo(self) -> None:
        assert self.content.drafted.pop() == self.id, "the last draft is the first that is undone"


def a_tip(seq: int = 7, **known: Any) -> Tip[Content]:
    return Tip(
        **{"seq": seq, "id": 99, "base": Base.CHAINED, "seen": 0, "version": 3, "keys": b"", "memory": None} | known
    )


KEYS = [recent_keys.item(key, content) for key in ("k", "l") for content in (b"one", b"other")]
MARKS = [producers.item("feed", n) for n in (1, 2, 3)]

tips = st.builds(
    a_tip,
    seq=st.sampled_from([0, 7, 7, 7]),
    keys=st.lists(st.sampled_from(KEYS), max_size=2).map(b"".join),
    keys_complete=st.booleans(),
    producers=st.sampled_from([None, b"", *MARKS]),
    flushed_seq=st.integers(0, 5),
)


@st.composite
def queues(draw: st.DrawFn) -> list[Waits]:
    content = Content()
    queue: list[Waits] = []
    for id_ in range(1, draw(st.integers(1, 12)) + 1):
        write = Waits(
            id_,
            draw(st.sampled_from(["drafts"] * 6 + ["needs the content", "needs the version", "is refused", "breaks"])),
            draw(st.sampled_from([1, 1, 10, 25, 25, 45, 85, 101])),
            content=content,
        )
        match draw(st.sampled_from(["plain", "plain", "keyed", "marked"])):
            case "keyed":
                write.keyed, write.item = True, draw(st.sampled_from(KEYS))
            case "marked":
                write.mark = draw(st.sampled_from(MARKS))
        write.ended, write.failed = draw(st.sampled_from([(False, False)] * 4 + [(True, False), (True, True)]))
        if queue and draw(st.booleans()):
            write.after = queue[-1]
        queue.append(write)
    return queue


def decide(queue: list[Waits], tip: Tip[Content], looked_up: bool) -> Taken[Content]:
    return next_unit("t", "thread.0.t", queue, tip, LIMITS, looked_up=len(queue) if looked_up else 0)


def unit_of(queue: list[Waits], taken: Taken[Content]) -> list[tuple[Waits, Drafted[Content]]]:
    return [(w, o) for w, o in zip(queue, taken.outcomes, strict=False) if isinstance(o, Drafted)]


def entries_of(messages: list[Outgoing], first_seq: int = 1) -> list[StoredEntry]:
    found = items_of([StoredMessage(m.subject, first_seq + i, m.header, m.body) for i, m in enumerate(messages)], "t")
    assert all(isinstance(entry, StoredEntry) for entry in found)
    return found  # type: ignore[return-value]


@given(queues(), tips, st.booleans())
def test_a_unit_is_a_chain_behind_the_tip_within_the_limits(
    queue: list[Waits], tip: Tip[Content], looked_up: bool
) -> None:
    taken = decide(queue, tip, looked_up)
    unit = unit_of(queue, taken)
    messages = [drafted.message for _, drafted in unit]
    entries = entries_of(messages)
    assert [e.entry.id for e in entries] == [w.id for w, _ in unit], "the queue's order, each once and whole"
    assert [e.entry.prev_id for e in entries] == [tip.id, *(e.entry.id for e in entries)][: len(entries)]
    assert [m.expected for m in messages] == [tip.seq, *[None] * len(messages)][: len(messages)]
    assert all(len(e.entry.payload) <= LIMITS.entry_bytes_max for e in entries)
    if len(unit) > 1:
        assert tip.seq, "what expects nothing in the log goes alone"
        assert sum(len(e.entry.payload) for e in entries) <= UNIT_BYTES
    assert len(messages) <= UNIT_ENTRIES
    for (_, drafted), stored in zip(unit, entries, strict=True):
        assert (drafted.after.id, drafted.after.keys, drafted.after.producers, drafted.after.version) == (
            stored.entry.id, stored.entry.keys, stored.entry.producers or drafted.after.producers, stored.entry.version
        )  # fmt: skip
    assert queue[0].content.drafted == [w.id for w, _ in unit], "what does not go out has left nothing behind"


@given(queues(), tips, st.booleans())
def test_each_answer_is_due_by_the_durable_tip(queue: list[Waits], tip: Tip[Content], looked_up: bool) -> None:
    taken = decide(queue, tip, looked_up)
    assert taken.needs is None or not unit_of(queue, taken)
    sent: list[Waits] = []
    told: dict[Waits, object] = {}
    for write, outcome in zip(queue, taken.outcomes, strict=False):
        told[write] = outcome
        match outcome:
            case None:
                assert write.ended
            case NotTried():
                assert write.after is not None
                assert write.after.failed or isinstance(told.get(write.after), Exception)
            case Drafted():
                assert write.after is None or not write.after.failed
                assert write.after is None or not isinstance(told.get(write.after), Exception)
                sent.append(write)
            case _:
                assert not sent, "what stands in this unit may still fail"
                match outcome:
                    case Receipt():
                        assert (outcome.thread_id, outcome.id, outcome.repeated) == ("t", tip.id, True)
                        assert outcome.thread_seq == (tip.seq or tip.flushed_seq)
                        known = recent_keys.find(tip.keys, write.item) if write.keyed else None
                        assert known or (write.mark and producers.holds(tip.producers or b"", write.mark))
                    case IdempotencyConflict():
                        assert recent_keys.find(tip.keys, write.item) is False
                    case TooLarge():
                        assert write.size > LIMITS.entry_bytes_max
                    case AlreadyExists():
                        assert looked_up
                        assert write.does == "is refused"
                    case _:
                        assert isinstance(outcome, ZeroDivisionError)
                        assert write.does == "breaks"
        assert outcome is None or not write.ended


@given(queues(), tips, st.booleans())
def test_it_changes_nothing_and_decides_the_same_again(queue: list[Waits], tip: Tip[Content], looked_up: bool) -> None:
    before, fields = list(queue), msgspec.structs.astuple(tip)
    first = decide(queue, tip, looked_up)
    for _, drafted in reversed(unit_of(queue, first)):
        drafted.draft.undo()
    assert queue == before
    assert msgspec.structs.astuple(tip) == fields
    again = decide(queue, tip, looked_up)
    assert [type(o) for o in again.outcomes] == [type(o) for o in first.outcomes]
    assert again.needs is first.needs
    assert [d.message for _, d in unit_of(queue, again)] == [d.message for _, d in unit_of(queue, first)]


@given(queues(), tips)
def test_round_by_round_each_write_ends_once(queue: list[Waits], tip: Tip[Content]) -> None:
    """As in a lane, on a log that stores everything: needs are looked up, and each unit lands."""
    left, ended, log = list(queue), list[int](), list[Outgoing]()
    content, looked_up = queue[0].content, False
    for _ in range(4 * len(queue)):
        if not left:
            break
        taken = decide(left, tip, looked_up)
        unit = unit_of(left, taken)
        for write, outcome in zip(left, taken.outcomes, strict=False):
            ended.append(write.id)
            write.ended, write.failed = True, write.failed or isinstance(outcome, Exception)
        assert taken.outcomes or taken.needs is not None, "each round gets on"
        del left[: len(taken.outcomes)]
        looked_up = taken.needs is not None
        match taken.needs:
            case Need.ROW:
                tip = msgspec.structs.replace(tip, keys_complete=True, producers=tip.producers or b"")
            case Need.BASE:
                tip = msgspec.structs.replace(tip, memory=content)
            case Need.VERSION:
                assert tip.memory is None
                tip = msgspec.structs.replace(tip, judged=True)
            case None if unit:
                log += [drafted.message for _, drafted in unit]
                tip = msgspec.structs.replace(unit[-1][1].after, seq=len(log))
    assert ended == [w.id for w in queue], "each once, in the order they came, none left over"
    assert [e.entry.id for e in entries_of(log)] == content.drafted, "what was drafted is what was sent"


def test_what_the_first_write_needs_is_asked_for_after_those_before_it_are_answered() -> None:
    known = a_tip(keys=KEYS[0], keys_complete=False, producers=None)
    repeat = Waits(1, keyed=True, item=KEYS[0])
    for write, need in (
        (Waits(2, keyed=True, item=KEYS[2]), Need.ROW),
        (Waits(2, mark=MARKS[0]), Need.ROW),
        (Waits(2, "needs the content"), Need.BASE),
        (Waits(2, "needs the version"), Need.VERSION),
        (Waits(2, "is refused for the version"), Need.VERSION),
        (Waits(2, "is refused"), Need.TIP),
    ):
        taken = decide([repeat, write, Waits(3)], known, looked_up=False)
        assert [type(o) for o in taken.outcomes] == [Receipt]
        assert taken.needs is need


def test_a_write_that_needs_more_than_the_tip_waits_for_the_unit_before_it() -> None:
    known = a_tip(keys=KEYS[0], keys_complete=False, producers=None)
    for write in (
        Waits(2, keyed=True, item=KEYS[0]),
        Waits(2, keyed=True, item=KEYS[2]),
        Waits(2, mark=MARKS[0]),
        Waits(2, "is refused"),
        Waits(2, "breaks"),
        Waits(2, size=101),
    ):
        taken = decide([Waits(1), write], known, looked_up=False)
        assert [type(o) for o in taken.outcomes] == [Drafted]
        assert taken.needs is None


def test_a_unit_ends_before_the_write_that_would_be_too_much() -> None:
    for sizes, fit in (([25, 10, 6], 2), ([45, 1], 1), ([1] * 10, UNIT_ENTRIES)):
        queue = [Waits(id_, size=size) for id_, size in enumerate(sizes, 1)]
        outcomes = decide(queue, a_tip(), looked_up=False).outcomes
        assert [type(o) for o in outcomes] == [Drafted] * fit


@pytest.mark.parametrize(
    ("write", "needed"),
    [
        (Waits(1, "needs the content"), Need.BASE),
        (Waits(1, "needs the version"), Need.VERSION),
        (Waits(1, "is refused for the version"), Need.VERSION),
        (Waits(1, "needs an entry or the content"), None),
        (Waits(1, "drafts"), None),
        (Waits(1, "is refused"), None),
        (Waits(1, "breaks"), None),
        (Waits(1, "needs the content", keyed=True), None),
        (Waits(1, "needs the version", keyed=True), None),
        (Waits(1, "needs the content", mark=MARKS[0]), None),
    ],
)
def test_only_what_cannot_repeat_another_write_goes_straight_for_what_it_needs(
    write: Waits, needed: Need | None
) -> None:
    assert needs(write) is needed
    assert not write.content.drafted, "what was drafted to find out is undone"
