"""Lookups of one turn of the loop go out as one request, and each caller gets its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from bufstore import LogUnavailable
from bufstore.buffer.append.lookups import Lookups


class Asked:
    """Answers once `go` is set: each key's length, nothing for "none"; or raises `error`."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, keys: list[str]) -> Mapping[str, int]:
        self.asked.append(keys)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return {key: len(key) for key in keys if key != "none"}


async def test_what_is_asked_in_one_turn_is_one_request() -> None:
    asked = Asked()
    lookups = Lookups(asked)
    asked.go.set()
    assert await asyncio.gather(*map(lookups.of, ["a", "bc", "a", "none"])) == [1, 2, 1, None]
    assert asked.asked == [["a", "bc", "none"]]
    assert await lookups.of("a") == 1
    assert len(asked.asked) == 2


async def test_a_caller_who_gives_up_ends_no_other() -> None:
    asked = Asked()
    lookups = Lookups(asked)

    async def ask(key: str) -> int | None:
        return await lookups.of(key)

    gone, same, other = (asyncio.create_task(ask(key)) for key in ("a", "a", "b"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asked.asked == [["a", "b"]]
    gone.cancel()
    await asyncio.wait([gone])
    asked.go.set()
    assert (await same, await other, gone.cancelled()) == (1, 1, True)


async def test_an_error_reaches_all_and_nobody_need_wait_for_it() -> None:
    asked = Asked()
    asked.error = ConnectionError("away")
    lookups = Lookups(asked)
    waiting = [lookups.of("a"), lookups.of("b")]
    lookups.of("c")  # nobody awaits it, and there is no warning of an error that was never retrieved
    asked.go.set()
    for answer in waiting:
        with pytest.raises(ConnectionError):
            await answer


@pytest.mark.parametrize("begun", [False, True])
async def test_a_look_that_somebody_cancels_fails_at_once_and_the_next_one_succeeds(begun: bool) -> None:
    """Regression: the callers waited on, and after a look that was cancelled before it began, nothing was looked up."""
    asked = Asked()
    lookups = Lookups(asked)
    waiting = [lookups.of("a"), lookups.of("b")]
    (task,) = lookups._tasks
    later = []
    if begun:
        await asyncio.sleep(0.01)
        later.append(lookups.of("later"))
    task.cancel()
    for answer in waiting:
        with pytest.raises(LogUnavailable, match="cancelled"):
            await asyncio.wait_for(answer, 1)
    asked.go.set()
    for answer in (*later, lookups.of("later")):
        assert await asyncio.wait_for(answer, 1) == 5
