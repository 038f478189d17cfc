"""Any order, duplication and splitting of deliveries gives the same state and watermark."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import Inapplicable
from bufstore.buffer.entry import Base, Entry, StoredEntry
from bufstore.buffer.read.overlay import from_log_alone, overlay
from bufstore.threads.coalesce import coalesce
from bufstore.threads.domain import THREADS
from bufstore.threads.model import Run, Thread, encode_messages, encode_run
from bufstore.threads.payload import Payload, encode_payload
from bufstore.threads.state import ThreadState
from bufstore.threads.write import save_of
from thorough import examples
from unit.history import THREAD, Flushed, Item, Oracle, Story, write_story

SEEDS = st.integers(0, 2**32)


async def agrees(flushed: Flushed, oracle: Oracle) -> None:
    found = flushed.store
    assert flushed.watermark == oracle.watermark
    assert sorted(p.item.seq for p in flushed.parked) == sorted(oracle.parked)
    assert await found.load_thread(THREAD) == oracle.thread
    assert found._messages.get(THREAD, []) == oracle.messages
    assert {r: record for r, (_, record) in found._runs.items()} == oracle.runs


def windows(chance: random.Random, chapter: list[Item], *, in_order: bool) -> list[list[Item]]:
    """The chapter in windows, with some entries delivered again, and in the end all of them once more."""
    made: list[list[Item]] = []
    rest = list(chapter)
    if not in_order:
        chance.shuffle(rest)
    while rest:
        count = chance.randint(1, len(rest))
        again = chance.sample(chapter, chance.randint(0, len(chapter)))
        window, rest = rest[:count], rest[count:]
        if in_order:
            again = [i for i in again if i.seq <= window[-1].seq]
        window += again
        chance.shuffle(window)
        made.append(window)
    return [*made, list(chapter)]


async def flush(story: Story, chance: random.Random, *, in_order: bool) -> Flushed:
    flushed = Flushed()
    for chapter in story.chapters:
        for window in windows(chance, chapter, in_order=in_order):
            await flushed.window(window, chapter, story.poison)
    return flushed


@examples(250)
@given(seed=SEEDS)
def test_any_order_of_deliveries_gives_the_same_state(seed: int) -> None:
    chance = random.Random(seed)
    story = write_story(chance)
    oracle = story.told()
    assert oracle.parked == [], "writers that follow the rules park nothing"
    asyncio.run(agrees(asyncio.run(flush(story, chance, in_order=False)), oracle))


@examples(250)
@given(seed=SEEDS)
def test_damage_and_poison_end_the_same_way_however_windows_are_cut(seed: int) -> None:
    chance = random.Random(seed)
    story = write_story(chance, damage=True)
    asyncio.run(agrees(asyncio.run(flush(story, chance, in_order=True)), story.told()))


async def state_of(flushed: Flushed) -> ThreadState:
    thread = await flushed.store.load_thread(THREAD)
    latest = flushed.store._runs[thread.latest_run_id][1] if thread and thread.latest_run_id else None
    return ThreadState(
        watermark=flushed.watermark, thread=thread, messages=flushed.store._messages.get(THREAD, []), latest_run=latest
    )


@examples(250)
@given(seed=SEEDS, damage=st.booleans())
def test_a_read_shows_what_a_flush_of_the_same_entries_makes(seed: int, damage: bool) -> None:
    chance = random.Random(seed)
    story = write_story(chance, damage=damage)
    oracle, flushed = Oracle(), Flushed()

    async def compare() -> None:
        for chapter in story.chapters:
            at = chance.randint(0, len(chapter))
            await flushed.window(chapter[:at], chapter, frozenset())
            before = await state_of(flushed)
            shown = overlay(THREADS, before, THREAD, chapter)
            again = overlay(THREADS, before, THREAD, chapter[at:])
            await flushed.window(chapter[at:], chapter, frozenset())
            after = await state_of(flushed)
            for item in chapter:
                oracle.take(item)
            for state in (shown, again):
                assert state.watermark == after.watermark == oracle.watermark
                assert state.thread == after.thread == oracle.thread
                assert state.messages == after.messages == oracle.messages
                assert state.latest_run == after.latest_run
            for run_id, record in shown.tail_runs.items():
                assert oracle.runs[run_id] == record

    asyncio.run(compare())


@examples(150)
@given(seed=SEEDS)
def test_the_log_alone_tells_the_same_or_nothing(seed: int) -> None:
    story = write_story(random.Random(seed), chapters=1)
    oracle = story.told()
    shown = from_log_alone(THREADS, THREAD, story.chapters[0])
    if shown is not None:
        assert shown.messages == oracle.messages
        assert shown.watermark.applied_id == oracle.watermark.applied_id
        assert shown.latest_run is None or shown.latest_run in oracle.runs.values()


def test_the_log_alone_does_not_show_an_entry_that_landed_too_late() -> None:
    """When more was purged, only Postgres knows whether an entry that expected nothing was superseded."""
    late = stored(50, 1, Payload(0, encode_messages(["old"]), *run_parts()), base=Base.UNKNOWN, whole=True, seen=10)
    on_it = stored(51, 2, Payload(3, encode_messages(["new"]), *run_parts()), prev=9, version=4)
    shown = from_log_alone(THREADS, THREAD, [late, on_it])
    assert shown is None, "the delta behind it says that the thread held three messages"


def run_parts(run_id: str = "r") -> tuple[bytes, object]:
    run = Run(run_id=run_id, thread_id=THREAD)
    return encode_run(run), save_of(run)


def stored(
    seq: int, id_: int, payload: Payload | bytes, *, prev: int = 0, base: Base = Base.CHAINED, version: int = 1,
    whole: bool = False, seen: int = 0,
) -> StoredEntry:  # fmt: skip
    data = payload if isinstance(payload, bytes) else encode_payload(payload)
    entry = Entry(
        id=id_, prev_id=prev, base=base, seen=seen, version=version, self_contained=whole, keys=b"", payload=data
    )
    return StoredEntry(THREAD, seq, entry)


@pytest.mark.parametrize(
    ("payload", "version"),
    [
        (b"", 1),
        (b"\xc1", 1),
        (b"\x91" * 100_000, 1),
        (encode_payload(Payload(0, [], *run_parts())) + b"x", 0),
        (Payload(1, [], *run_parts()), 1),
        (Payload(0, [b"\x01"], *run_parts()), 2),
        (Payload(-1, [b"\x01"], *run_parts()), 0),
        (Payload(2**63, [], *run_parts()), 2**63 - 1),
    ],
    ids=["empty", "junk", "deep", "trailing", "keeps too much", "wrong version", "negative", "huge"],
)
def test_a_payload_that_does_not_fit_is_poison(payload: Payload | bytes, version: int) -> None:
    entry = stored(1, 77, payload, prev=76, version=version)
    with pytest.raises(Inapplicable) as raised:
        coalesce(THREAD, 0, [entry])
    assert raised.value.entry_id == 77


def test_a_thread_that_the_wrapped_store_knew_before_the_buffer_can_be_appended_to() -> None:
    """The row of a thread that was never flushed says nothing of its version; the writer that read it does."""
    entry = stored(5, 1, Payload(2, encode_messages(["third"]), *run_parts()), base=Base.NONE, version=3, seen=4)

    async def main() -> Flushed:
        flushed = Flushed()
        await flushed.store.checkpoint(THREAD, ["first", "second"], Run(run_id="old", thread_id=THREAD))
        await flushed.window([entry], [entry], frozenset())
        assert flushed.parked == []
        assert await flushed.store.load_messages(THREAD) == ["first", "second", "third"]
        return flushed

    assert asyncio.run(main()).watermark == Watermark(flushed_seq=5, applied_id=1, version=3)


def test_a_read_of_nothing_is_the_state_as_it_was() -> None:
    state = ThreadState(watermark=Watermark(), thread=None, messages=[], latest_run=None)
    assert overlay(THREADS, state, THREAD, []) == state
    thread = Thread(thread_id=THREAD, version=1)
    known = ThreadState(watermark=Watermark(9, 9, 1), thread=thread, messages=[b"\x01"], latest_run=None)
    assert overlay(THREADS, known, THREAD, [stored(9, 9, b"")]) == known
