"""Behind which entries an operation on a thread may stand, and what is left to others to decide."""

from __future__ import annotations

from typing import Any

import pytest

from bufstore.buffer.append.tip import NeedBase, Tip
from bufstore.buffer.entry import Base
from bufstore.errors import ConcurrentWriter, StoreUnavailable, ThreadQuarantined
from bufstore.langgraph.domain import Known
from bufstore.langgraph.write import Appending, Overtaken


def behind(memory: Known | None, seq: int = 9, id_: int = 7, **fields: Any) -> Tip[Known]:
    """The tip of a thread whose last entry has this place (0: the log does not show the thread) and id."""
    return Tip(seq, id_, Base.CHAINED if seq else Base.UNKNOWN, 0, 4, b"", memory, **fields)


def appending(*, down: bool = False, goes_on: bool = True, **fields: Any) -> Appending:
    return Appending("t", b"an operation", lambda: down, lambda *_: goes_on, **fields)


@pytest.mark.parametrize("fields", [{}, {"seen": lambda: 7}, {"only_behind": 7}])
@pytest.mark.parametrize("deletes", [False, True])
def test_a_thread_is_looked_up_unless_a_deletion_stands_behind_anything(fields: Any, deletes: bool) -> None:
    for seq in (0, 9):
        if deletes and not fields:
            assert appending(deletes=True).prepare(behind(None, seq)).self_contained
        else:
            with pytest.raises(NeedBase):
                appending(deletes=deletes, **fields).prepare(behind(None, seq))


def test_while_the_store_is_away_it_is_enough_that_the_log_shows_the_thread() -> None:
    draft = appending(down=True).prepare(behind(None))
    assert not draft.self_contained, "it stands behind what only others know"
    assert draft.memory is None and draft.version == 5
    with pytest.raises(NeedBase):
        appending(down=True).prepare(behind(None, 0))
    assert appending(down=True, assume_new=True).prepare(behind(None, 0)).self_contained
    assert not appending(down=True, assume_new=True).prepare(behind(None)).self_contained


@pytest.mark.parametrize(("new", "seq", "alone"), [(True, 0, True), (True, 9, False), (False, 0, False)])
def test_only_what_begins_a_thread_stands_alone(new: bool, seq: int, alone: bool) -> None:
    assert appending().prepare(behind(Known(new=new), seq)).self_contained is alone
    assert appending(deletes=True).prepare(behind(Known(new=new), seq)).self_contained


def test_what_was_read_before_an_outage_counts_only_if_nobody_can_have_written_since() -> None:
    cached = Known(cached=True)
    with pytest.raises(NeedBase):
        appending(goes_on=False).prepare(behind(cached, 0, flushed_seq=5))
    it = appending()
    assert not it.prepare(behind(cached, 0, flushed_seq=5)).self_contained
    assert it.behind is None, "what was read before is not what this entry stands behind"
    assert not appending(goes_on=False).prepare(behind(cached)).self_contained, "the log shows what it stands behind"
    assert appending(goes_on=False, deletes=True).prepare(behind(cached, 0)).self_contained


def test_only_a_deletion_stands_behind_what_is_parked() -> None:
    tip = behind(Known(), broken_since=3)
    with pytest.raises(ThreadQuarantined):
        appending().prepare(tip)
    assert appending(deletes=True).prepare(tip).self_contained
    with pytest.raises(ThreadQuarantined):
        appending(deletes=True, only_behind=7).prepare(tip)
    with pytest.raises(StoreUnavailable):  # a replay may have healed the thread since it was read
        appending().prepare(behind(Known(cached=True), broken_since=3))


def test_what_others_have_written_since_it_was_read_is_told() -> None:
    with pytest.raises(ConcurrentWriter):
        appending(seen=lambda: 6).prepare(behind(Known()))
    assert appending(seen=lambda: 7).prepare(behind(Known())).memory is not None
    assert appending(seen=lambda: 6).prepare(behind(Known(own=True))).memory is not None, "the last entry is ours"
    with pytest.raises(ConcurrentWriter):
        appending(seen=lambda: 6, down=True).prepare(behind(None))
    for own in (False, True):
        with pytest.raises(ConcurrentWriter):
            appending(only_behind=6).prepare(behind(Known(own=own)))
        assert appending(only_behind=7).prepare(behind(Known(own=own))).memory is not None


def test_a_life_goes_on_behind_entries_of_this_process_only() -> None:
    memory = Known()
    it = appending(life=memory.life)
    draft = it.prepare(behind(memory))
    assert draft.memory is not None and draft.memory.own
    assert it.left == draft.memory.life == memory.life and it.behind == 7
    with pytest.raises(Overtaken):
        appending(life=memory.life).prepare(behind(Known()))
    with pytest.raises(Overtaken):
        appending(life=memory.life, down=True).prepare(behind(None))
    unknown = appending(down=True)
    assert unknown.prepare(behind(None)).memory is None and unknown.left is None
