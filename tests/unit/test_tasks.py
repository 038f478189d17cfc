"""Tasks and calls side by side: nothing that was begun goes on when it is over."""

from __future__ import annotations

import asyncio

import pytest

from bufstore.tasks import end, together


async def test_an_error_is_raised_when_all_calls_have_ended() -> None:
    ended: list[str] = []

    async def call(name: str, turns: int, error: Exception | None = None) -> str:
        for _ in range(turns):
            await asyncio.sleep(0)
        ended.append(name)
        if error is not None:
            raise error
        return name

    with pytest.raises(ValueError, match="first"):
        await together([call("a", 5), call("b", 1, ValueError("first")), call("c", 0, TypeError("later"))])
    assert sorted(ended) == ["a", "b", "c"]
    assert await together([call("d", 2), call("e", 0)]) == ["d", "e"]


async def test_tasks_that_are_ended_have_ended_whatever_they_raise() -> None:
    closed = asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            closed.set()
            raise ValueError("on the way out")

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end(task, None)
    assert closed.is_set()
    assert task.done()
