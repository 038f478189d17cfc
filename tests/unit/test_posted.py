"""A message that is on its way without a task ends once: by its answer, with its time, or with its connection."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from bufstore.jetstream.messages import AppendUnknown
from bufstore.jetstream.pace import Pace
from bufstore.jetstream.posted import Posted
from bufstore.jetstream.questions import Questions
from unit.fake_log import run

_TIMEOUT_S = 5.0


class Client:
    """A client that counts as alive."""

    def heard(self) -> None:
        pass


class Post:
    """A posted message, and what was told of it."""

    def __init__(self) -> None:
        self.questions, self.pace = Questions(), Pace()
        self.told: list[bytes | Exception] = []
        self.ended = asyncio.Event()
        self.posted = Posted(self.questions, self.pace, "subject", _TIMEOUT_S, self._told)

    def _told(self, posted: Posted, outcome: bytes | Exception) -> None:
        self.told.append(outcome)
        self.ended.set()

    def answer(self, data: bytes = b"answer") -> None:
        self.questions.end(self.posted.token, data)

    def left_nothing(self) -> bool:
        return not len(self.questions) and not self.pace._limits


def test_the_first_answer_ends_it_and_nothing_comes_after() -> None:
    async def main() -> None:
        post = Post()
        post.answer()
        post.answer(b"another")
        post.questions.end_all(AppendUnknown("lost"))
        await asyncio.sleep(10 * _TIMEOUT_S)
        assert post.told == [b"answer"]
        assert post.left_nothing()

    run(main())


def test_without_an_answer_it_ends_unknown_when_its_time_is_over() -> None:
    async def main() -> None:
        post, loop = Post(), asyncio.get_running_loop()
        began = loop.time()
        await post.ended.wait()
        assert _TIMEOUT_S <= loop.time() - began < _TIMEOUT_S + 0.1
        assert isinstance(post.told[0], AppendUnknown)
        assert post.posted.expired()
        assert post.left_nothing()

    run(main())


def test_an_answer_that_has_come_by_the_end_of_its_time_is_read_first() -> None:
    async def main() -> None:
        post, loop = Post(), asyncio.get_running_loop()

        def arrives(turns: int) -> None:  # as read and understood after a stop of the loop
            if turns:
                loop.call_soon(arrives, turns - 1)
            else:
                post.answer()

        loop.call_later(_TIMEOUT_S, arrives, 5)
        await asyncio.sleep(2 * _TIMEOUT_S)
        assert post.told == [b"answer"]

    run(main())


def test_whoever_takes_it_back_is_told_nothing() -> None:
    async def main() -> None:
        for late in (False, True):
            post = Post()
            if late:  # between the end of its time and the last look
                asyncio.get_running_loop().call_at(post.posted.when(), post.posted.cancel)
                await asyncio.sleep(2 * _TIMEOUT_S)
            else:
                post.posted.cancel()
            post.answer()
            await asyncio.sleep(2 * _TIMEOUT_S)
            assert post.told == []
            assert post.left_nothing()

    run(main())


def test_a_lost_connection_ends_it() -> None:
    async def main() -> None:
        post = Post()
        error = AppendUnknown("lost")
        post.questions.end_all(error)
        assert post.told == [error]
        assert post.left_nothing()

    run(main())


def test_it_waits_longer_while_bytes_of_a_large_write_leave() -> None:
    async def main() -> None:
        post, loop = Post(), asyncio.get_running_loop()
        for at in range(1, 4):
            loop.call_later(at * 4.0, partial(post.pace.moved, Client()))
        await asyncio.sleep(4 * 4.0)
        assert post.told == []
        post.answer()
        assert post.told == [b"answer"]
        post.pace.lost()

    run(main())


def test_what_fails_while_it_is_posted_leaves_nothing_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: its question stayed, and each end of the connection failed on it."""

    def fails(*_: Any) -> None:
        raise MemoryError

    async def main() -> None:
        monkeypatch.setattr(Pace, "begin", fails)
        questions = Questions()
        with pytest.raises(MemoryError):
            Posted(questions, Pace(), "subject", _TIMEOUT_S, fails)
        assert not len(questions)
        await asyncio.sleep(2 * _TIMEOUT_S)

    run(main())
