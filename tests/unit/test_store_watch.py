"""Who waits for the store is told when it goes down, however many they are, and however busy the process is."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from bufstore.buffer.read.store_watch import StoreWatch
from bufstore.errors import StoreUnavailable
from unit.fake_log import run

_PATIENCE_S = 0.01


class _Answering:
    """A store that answers at once, which takes some turns of the loop to arrive."""

    async def state(self, thread_id: str) -> Any:
        await asyncio.Event().wait()

    async def answers(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)


async def _busy() -> None:
    """Keep the loop busy: each of its turns takes longer than the store may take to answer."""
    while True:
        time.sleep(2 * _PATIENCE_S)  # noqa: ASYNC251
        await asyncio.sleep(0)


async def test_a_busy_loop_is_no_outage_of_the_store() -> None:
    watch = StoreWatch[Any](_Answering(), 2 * _PATIENCE_S)
    busy = asyncio.ensure_future(_busy())
    asked = watch.ask("t")
    deadline = asyncio.get_running_loop().time() + 20 * _PATIENCE_S
    try:
        assert await watch.stored(asked, deadline) is None
        assert watch.down is None
    finally:
        busy.cancel()
        watch.let_go(asked)
        await watch.aclose()


class _Slow:
    """A store that is up and too busy to answer reads within three seconds, or goes away and keeps silent."""

    def __init__(self, away_at: float = float("inf")) -> None:
        self.questions: list[float] = []
        self._away_at = away_at

    async def state(self, thread_id: str) -> Any:
        await asyncio.sleep(3.2 if self._away_at > 4 else 60)
        return thread_id

    async def answers(self) -> None:
        now = asyncio.get_running_loop().time()
        self.questions.append(now)
        if now >= self._away_at:
            await asyncio.sleep(60)


class _Turns:
    """Counts how often a task that waits for the store runs."""

    def __init__(self, wait: Any) -> None:
        self.count, self._wait = 0, wait

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return await self._wait(*args, **kwargs)


def test_reads_that_wait_for_a_busy_store_ask_it_together_and_do_not_wake_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: each of them looked once a second, which kept the loop so busy that none had its answer in time."""
    turns = _Turns(asyncio.wait)
    monkeypatch.setattr(asyncio, "wait", turns)

    async def main() -> None:
        store, loop = _Slow(), asyncio.get_running_loop()
        watch = StoreWatch[Any](store, 10.0)
        began = loop.time()
        asked = [watch.ask(f"t{i}") for i in range(100)]
        assert await asyncio.gather(*(watch.stored(task, began + 10.0) for task in asked)) == [
            f"t{i}" for i in range(100)
        ]
        assert [round(at - began) for at in store.questions] == [1, 2, 3]
        assert turns.count == 100 + len(store.questions), "one wait of each read, and one of each question"
        await watch.aclose()

    run(main())


def test_reads_that_come_while_the_store_is_asked_arm_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = _Slow(away_at=loop.time() + 0.5)
        watch = StoreWatch[Any](store, 10.0)
        looks, look = 0, watch._look

        def counted() -> None:
            nonlocal looks
            looks += 1
            look()

        monkeypatch.setattr(watch, "_look", counted)

        async def read(after_s: float) -> None:
            await asyncio.sleep(after_s)
            asked = watch.ask("t")
            assert await watch.stored(asked, loop.time() + 10.0) is None
            watch.let_go(asked)

        await asyncio.gather(read(0.0), *(read(1.0 + i / 100) for i in range(1, 190)))  # the question takes two seconds
        assert looks == 1
        await watch.aclose()

    run(main())


def test_reads_that_wait_are_told_at_once_when_the_store_goes_down() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        store = _Slow(away_at=began + 1.5)
        watch = StoreWatch[Any](store, 10.0)

        async def read(after_s: float) -> float:
            await asyncio.sleep(after_s)
            asked = watch.ask("t")
            assert await watch.stored(asked, loop.time() + 10.0) is None
            watch.let_go(asked)
            return loop.time() - began

        # The first question, after a second, is answered; the next, a second later, is given up two seconds later.
        assert [round(at, 1) for at in await asyncio.gather(read(0.0), read(1.7), read(3.9))] == [4.0, 4.0, 4.0]
        await watch.aclose()

    run(main())


def test_a_store_that_answers_soon_is_not_asked_whether_it_answers() -> None:
    class Soon(_Slow):
        async def state(self, thread_id: str) -> Any:
            await asyncio.sleep(0.3)
            return thread_id

    async def main() -> None:
        store, loop = Soon(), asyncio.get_running_loop()
        watch = StoreWatch[Any](store, 10.0)

        async def reads() -> None:
            for _ in range(20):
                assert await watch.stored(watch.ask("t"), loop.time() + 10.0) == "t"

        async def later() -> None:
            await asyncio.sleep(0.1)
            await reads()

        await asyncio.gather(reads(), later())  # at each moment somebody waits, but nobody for long
        assert not store.questions
        await watch.aclose()

    run(main())


@pytest.mark.parametrize("turns", range(6))
def test_nobody_looks_whether_the_store_is_back_once_the_watch_is_closed(turns: int) -> None:
    """Regression: a question that failed just when the watch closed began to look, for as long as the loop lived."""

    class Asked(_Answering):
        async def answers(self) -> None:
            self.answer = asyncio.get_running_loop().create_future()
            await self.answer

    async def main() -> None:
        store = Asked()
        watch = StoreWatch[Any](store, 10.0)
        watch.take_for_down("away")
        await asyncio.sleep(0.1)
        store.answer.set_result(None)
        await asyncio.sleep(0.1)
        assert watch.down is None
        question = watch._asking()
        await asyncio.sleep(0.1)
        store.answer.set_exception(StoreUnavailable("away again"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await watch.aclose()
        assert question.done()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
