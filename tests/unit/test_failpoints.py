"""Failpoints: each is reached from one place, and costs next to nothing when off."""

from __future__ import annotations

import re
import timeit
from collections import Counter
from pathlib import Path

import pytest

from bufstore import failpoints
from bufstore.failpoints import Failpoint, reach

_SOURCE = Path(failpoints.__file__)


def test_every_point_is_reached_from_exactly_one_place() -> None:
    others = (p.read_text() for p in _SOURCE.parent.rglob("*.py") if p != _SOURCE)
    used = Counter(re.findall(r"reach\((?:failpoints\.)?Failpoint\.(\w+)\)", "\n".join(others)))
    assert used == Counter(point.name for point in Failpoint)


def test_every_point_says_where_it_stands_and_what_could_be_lost() -> None:
    lines = _SOURCE.read_text().splitlines()
    members = [i for i, line in enumerate(lines) if re.fullmatch(r'    [A-Z_]+ = "[a-z-]+"', line)]
    assert len(members) == len(Failpoint)
    assert all(lines[i - 1].strip().startswith("#:") for i in members)


def test_nothing_listens_unless_a_test_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failpoints.active is None
    heard: list[Failpoint] = []
    monkeypatch.setattr(failpoints, "active", heard.append)
    reach(Failpoint.FLUSH_BEFORE)
    assert heard == [Failpoint.FLUSH_BEFORE]


def test_off_a_point_costs_next_to_nothing() -> None:
    times = 100_000
    seconds = min(timeit.repeat(lambda: reach(Failpoint.FLUSH_BEFORE), number=times, repeat=5))
    # 0.1 µs measured, the lambda included; an append takes at least a hundred times as long.
    assert seconds / times < 2e-6
