"""Holding something for a time: it is renewed while in use, and lost otherwise."""

from __future__ import annotations

import asyncio

import pytest

from bufstore import elapsed
from bufstore.holding import Holding
from unit.fake_log import run


class Held:
    """Something held for ten seconds, and what happened to it."""

    def __init__(self) -> None:
        self.renewed: list[float] = []
        self.lost_at: list[float] = []
        self.answers: list[bool] = []
        self.began = elapsed.now_s()
        self.holding = Holding(10.0, self.began, lambda: self.lost_at.append(self.age()))

    def age(self) -> float:
        """Seconds since it was taken."""
        return round(elapsed.now_s() - self.began, 3)

    async def renew(self) -> bool:
        """Answer as `answers` says; hang when none is left."""
        began = elapsed.now_s()
        self.renewed.append(self.age())
        if not self.answers:
            await asyncio.sleep(3600)
        if held := self.answers.pop(0):
            self.holding.confirm(began)
        return held


def test_what_is_not_renewed_is_lost_when_its_time_is_over() -> None:
    async def main() -> None:
        held = Held()
        await asyncio.sleep(9)
        assert held.lost_at == []
        await asyncio.sleep(9)
        assert held.lost_at == [10.0]

    run(main())


def test_a_renewal_without_an_answer_does_not_keep_it() -> None:
    async def main() -> None:
        held = Held()
        held.answers = [True, True]
        held.holding.keep(held.renew, 3.0)
        await asyncio.sleep(60)
        assert held.renewed == [3.0, 6.0, 9.0], "and it was not asked again when it was lost"
        assert held.lost_at == [16.0], "for so long after the last one that was confirmed began"

    run(main())


def test_what_says_that_it_is_over_is_not_lost_as_well() -> None:
    async def main() -> None:
        held = Held()
        held.answers = [True, False]
        held.holding.keep(held.renew, 3.0)
        await asyncio.sleep(60)
        assert held.renewed == [3.0, 6.0]
        assert held.lost_at == []

    run(main())


def test_what_is_closed_is_renewed_no_more_and_what_is_stopped_is_not_lost() -> None:
    async def main() -> None:
        closed, stopped = Held(), Held()
        for held in (closed, stopped):
            held.answers = [True] * 10
            held.holding.keep(held.renew, 3.0)
        await asyncio.sleep(4)
        await closed.holding.aclose()
        await stopped.holding.aclose()
        stopped.holding.stop()
        await asyncio.sleep(60)
        assert closed.renewed == stopped.renewed == [3.0]
        assert (closed.lost_at, stopped.lost_at) == ([13.0], [])

    run(main())


def test_what_is_renewed_far_more_often_than_it_must_be_is_renewed_in_time() -> None:
    """A worker with a long lease renews its signal with the same call."""

    async def main() -> None:
        held = Held()
        held.answers = [True, True, True, False]
        held.holding.keep(held.renew, 0.1)
        await asyncio.sleep(1)
        assert held.renewed == [0.1, 0.2, 0.3, 0.4]

    run(main())


def test_the_time_in_which_the_machine_was_suspended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        before = elapsed.suspended_s()
        held = Held()
        await asyncio.sleep(2)
        assert not held.holding.is_over
        monkeypatch.setattr(elapsed, "suspended_s", lambda: before + 7.5)
        assert not held.holding.is_over
        monkeypatch.setattr(elapsed, "suspended_s", lambda: before + 8.5)
        assert held.holding.is_over
        held.holding.confirm(elapsed.now_s())
        assert not held.holding.is_over
        held.holding.stop()

    run(main())
