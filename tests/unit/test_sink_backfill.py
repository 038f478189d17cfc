"""Rows that bypass the log are folded once each, and some rows go through the log all the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import InvalidRecord, Run
from bufstore.buffer import producers
from bufstore.buffer.chain import Watermark
from bufstore.spark.sink.backfill import NeedLog, Prepared, fold, prepare
from bufstore.spark.sink.checkpoint_rows import CheckpointRow
from bufstore.threads.model import decode_message


def prepared(number: int, messages: list[Any], *, whole: bool = False, **run: Any) -> Prepared:
    wanted = CheckpointRow("t", whole, messages, Run(run_id="r", thread_id="t", **run))
    (found,) = prepare("t", [(wanted, producers.item("q", number))])
    return found


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 99), max_size=3)), min_size=1, max_size=12),
    st.lists(st.integers(0, 12), max_size=6),
)
def test_rows_folded_in_parts_and_again_are_as_if_written_one_by_one(
    rows: list[tuple[bool, list[int]]], cuts: list[int]
) -> None:
    wanted: list[int] = []
    for is_whole, messages in rows:
        wanted = [*([] if is_whole else wanted), *messages]
    writes = [prepared(n, messages, whole=is_whole) for n, (is_whole, messages) in enumerate(rows)]
    held: list[int] = []
    row, written = Watermark(), 0
    for cut in [*cuts, len(writes)]:  # each try repeats its part from the beginning
        found = fold("t", row, row.version, writes[:cut], new_id=cut + 1)
        assert found.written + found.repeated == min(cut, len(writes))
        written += found.written
        if found.change is None:
            assert found.watermark == row
            continue
        held = [*held[: found.change.keep], *(decode_message(m) for m in found.change.messages)]
        row = found.watermark
        assert row.version == len(held)
    assert (held, written) == (wanted, len(writes))


def test_what_the_log_must_judge_goes_there() -> None:
    with pytest.raises(NeedLog):
        fold("t", Watermark(flushed_seq=5, applied_id=1, broken_since=5), 0, [prepared(0, [1])], 7)
    with pytest.raises(NeedLog):
        fold("t", Watermark(), 0, [prepared(0, [1], parent_thread_id="p")], 7)
    with_id = prepared(1, [{"id": "a"}])
    assert fold("t", Watermark(), 0, [with_id], 7).written == 1
    with pytest.raises(NeedLog):
        fold("t", Watermark(applied_id=1, version=2), 2, [with_id], 7)
    with pytest.raises(InvalidRecord):
        prepared(1, [{"id": "a"}, {"id": "a"}])
