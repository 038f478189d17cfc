"""Threads as a job reads them: flushed messages stay in Postgres, and the outcome is that of a read."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.chain import Watermark
from bufstore.buffer.read.overlay import overlay
from bufstore.spark.tables.overlaid import Late, overlaid
from bufstore.threads.domain import THREADS
from bufstore.threads.model import encode_metadata
from bufstore.threads.state import ThreadState
from unit.history import THREAD, write_story


def row_of(state: ThreadState) -> tuple[Any, ...]:
    """The row that ``thread_row_v2`` returns for a thread."""
    thread, mark = state.thread, state.watermark
    columns: tuple[Any, ...] = (None,) * 6
    if thread is not None:
        ids = (thread.parent_thread_id, thread.latest_run_id, thread.active_run_id, thread.open_run_id)
        columns = (thread.version, *ids, encode_metadata(thread.metadata))
    known: tuple[Any, ...] = (None,) * 6
    if mark.flushed_seq:
        known = (mark.flushed_seq, mark.applied_id, mark.version, mark.keys, mark.broken_since, mark.producers)
    return state.latest_run, *columns, state.state, *known, None


@given(st.integers(0, 1 << 32), st.booleans(), st.data())
def test_it_is_what_a_read_shows_without_the_messages_of_postgres(seed: int, damage: bool, data: st.DataObject) -> None:
    story = write_story(random.Random(seed), damage=damage)
    items = [item for chapter in story.chapters for item in chapter]
    flushed = data.draw(st.integers(0, len(items)))
    waits = data.draw(st.integers(flushed, len(items)))
    empty = ThreadState(watermark=Watermark())
    stored = overlay(THREADS, empty, THREAD, items[:flushed]) if flushed else empty
    stored = msgspec.structs.replace(stored, tail_runs={})
    waiting, tail = items[flushed:waits], items[waits:]
    expected = stored
    for some in (waiting, tail):
        expected = overlay(THREADS, expected, THREAD, some) if some else expected

    # Flushed entries may still be in the log.
    again = data.draw(st.integers(0, flushed)) if waits == flushed else flushed
    late = [[Late(item, item.seq) for item in some] for some in (waiting, [*items[again:flushed], *tail])]
    found = overlaid(THREAD, row_of(stored), *late)
    if found is None:
        assert flushed == len(items)
        return
    assert found.changed_at == items[-1].seq
    shown = found.state
    assert (shown.thread, shown.latest_run, shown.state) == (expected.thread, expected.latest_run, expected.state)
    assert (shown.watermark.flushed_seq, shown.watermark.broken_since) == (
        expected.watermark.flushed_seq,
        expected.watermark.broken_since,
    )
    assert (shown.deleted, shown.tail_runs) == (expected.deleted, expected.tail_runs)
    new = dict(found.new_messages())
    assert list(new) == list(range(found.kept, len(expected.messages)))
    assert [*stored.messages[: found.kept], *new.values()] == expected.messages
    assert shown.tail_runs.keys() <= found.run_times.keys()
