"""When a process without a flusher asks what it may forget about the log."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bufstore.buffer.groups.forgetting import _FORGET_EVERY_S, Forgetting
from bufstore.buffer.places import first_place
from bufstore.errors import LogUnavailable
from unit.fake_log import run


class World:
    """Heads that remember much or little, and a log that says what is settled."""

    def __init__(self) -> None:
        self.much, self.refused, self.away = True, False, False
        self.oldest: int | None = None
        self.asked = 0
        self.forgot: list[int] = []
        self.forgetting = Forgetting(self, lambda: self.oldest, self._settled, lambda: self.refused)  # type: ignore[arg-type]

    async def _settled(self) -> int:
        self.asked += 1
        if self.away:
            raise LogUnavailable("away")
        return first_place(100)

    def forgets(self, floor: int) -> bool:
        return True

    def forget(self, floor: int) -> None:
        self.forgot.append(floor)

    async def passes(self, times: int) -> None:
        await asyncio.sleep(times * _FORGET_EVERY_S + 0.1)


def test_it_asks_now_and_then_while_much_is_remembered() -> None:
    async def main() -> None:
        world = World()
        world.much = False
        world.forgetting.look_soon()
        await world.passes(2)
        assert world.asked == 0
        world.much = True
        for _ in range(3):
            world.forgetting.look_soon()
        await world.passes(2)
        assert world.asked == 2, "one task for all calls"
        world.much = False
        await world.passes(2)
        assert world.asked == 3, "it finds out that little is left when it looks next"
        world.much = True
        world.forgetting.look_soon()
        await world.passes(1)
        assert world.asked == 4
        await world.forgetting.aclose()
        world.forgetting.look_soon()
        await world.passes(1)
        assert world.asked == 4

    run(main())


@pytest.mark.parametrize("why", ["a flusher has said it", "the log is refused", "the log is away"])
def test_it_forgets_nothing_by_a_question_that_is_not_needed_or_has_no_answer(why: str) -> None:
    async def main() -> None:
        world = World()
        world.refused, world.away = why == "the log is refused", why == "the log is away"
        world.forgetting.look_soon()
        await asyncio.sleep(0)
        if why == "a flusher has said it":
            world.forgetting.forget(first_place(7))
        await world.passes(1)
        assert world.asked == (why == "the log is away")
        assert world.forgot == ([first_place(7)] if why == "a flusher has said it" else [])
        world.refused = world.away = False
        await world.passes(1)
        assert world.forgot[-1] == first_place(100)
        await world.forgetting.aclose()

    run(main())


@pytest.mark.parametrize(("oldest", "floor"), [(None, 100), (30, 30), (100, 100), (200, 100)])
def test_what_a_waiting_unit_was_drafted_on_is_kept(oldest: int | None, floor: int) -> None:
    async def main() -> None:
        world = World()
        world.oldest = oldest
        told: list[Any] = []
        world.forgetting.on_forget(lambda everything: told.append((everything, list(world.forgot))))
        world.forgetting.forget(first_place(100))
        assert world.forgot == [first_place(floor)]
        assert told == [(False, [])], "before anything is forgotten"

    run(main())
