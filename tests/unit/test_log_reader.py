"""A look at the log of which some is known already: a node that leads no more is asked again, and nothing is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from bufstore.buffer.subjects import first_sequence
from bufstore.config import LogConfig, as_nats_config
from bufstore.nats import ranges
from bufstore.nats.ranges import LogReader, LogState
from unit.test_threadlog_stream import log_at


class Looking(LogReader):
    """Shows these ends, one a look, and the last one from then on. A message that is stored would be an error."""

    def __init__(self, ends: Sequence[int], replicas: int = 3, created: Sequence[str] = ("then",)) -> None:
        super().__init__(as_nats_config("nats://127.0.0.1:1"), "LOG")
        self.ends, self.created, self.looks, self._replicas = ends, created, 0, replicas

    async def _look(self) -> LogState:
        self.looks += 1
        log, number = log_at(self.ends[min(self.looks, len(self.ends)) - 1]), min(self.looks, len(self.created)) - 1
        config = LogConfig(replicas=self._replicas)
        return msgspec.structs.replace(log, config=config, created=self.created[number])

    async def _proven_end(self, *_: Any) -> int:
        raise AssertionError("a proof would take the place of what was lost")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_AGAIN_S", 0.001)
    monkeypatch.setattr(ranges, "_OLD_LEADER_S", 0.5)


def end_of(looking: Looking, reached: int) -> int:
    return asyncio.run(looking.look(reached=reached)).end


def test_a_node_that_leads_no_more_is_asked_again() -> None:
    looking = Looking([3, 3, 7])
    assert (end_of(looking, 5), looking.looks) == (7, 3)
    assert end_of(Looking([3, 7]), 3) == 3, "all that is known is there"


def test_a_log_that_went_back_is_shown_as_it_is_however_often_it_is_looked_at() -> None:
    """Regression: on replicas each look stored a proof, until these stood where the lost messages had been."""
    for _ in range(3):
        assert end_of(Looking([4]), 5) == 4


def test_a_single_server_and_a_new_stream_are_believed_at_once() -> None:
    alone, new = Looking([3, 7], replicas=1), Looking([1000, 3], created=("now", "then"))
    assert (end_of(alone, 5), alone.looks) == (3, 1)
    assert (end_of(new, 5), new.looks) == (1000, 1), "a repair makes a stream whose numbers are higher"


def test_of_two_streams_the_later_one_counts() -> None:
    """Regression: any change of the stream was believed, also one from the present stream to that before a repair."""
    looking = Looking([1003, 60, 60, 1007], created=("now", "then", "then", "now"))
    assert (end_of(looking, 1005), looking.looks) == (1007, 4)


def test_a_proof_in_a_later_stream_shows_which_one_that_is() -> None:
    """Regression: a fresh look joined the end of a repaired log to the name of the stream before the repair."""

    class Repaired(Looking):
        async def _proven_end(self, *_: Any) -> int:
            return first_sequence(2) + 5

    looking = Repaired([60, 60, first_sequence(2) + 5], created=("then", "then", "now"))
    log = asyncio.run(looking.look(fresh=True))
    assert (log.created, log.end, looking.looks) == ("now", first_sequence(2) + 5, 3)


def test_a_proof_in_the_same_stream_needs_no_other_look() -> None:
    class Proven(Looking):
        async def _proven_end(self, *_: Any) -> int:
            return 61

    looking = Proven([60])
    assert (asyncio.run(looking.look(fresh=True)).end, looking.looks) == (61, 1)
