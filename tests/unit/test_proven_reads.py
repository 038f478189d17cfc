"""Reads of a replicated log: whoever answers must have proved that he leads, after he was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import BufferedThreadStore, LogUnavailable, MemoryThreadStore, NotFound, ReadNotFresh, StoreUnavailable
from bufstore.buffer.shared_call import SharedCall
from bufstore.config import BufferConfig, LogConfig
from bufstore.jetstream.messages import AppendUnknown, StoredMessage
from bufstore.memory import MemoryNats
from bufstore.nats.log import NatsLog
from helpers import fresh, run_of
from unit.fake_log import run

SUBJECT = "thread.0.t"


class Replicated(NatsLog):
    """A log whose leader may be alone: then it answers reads, and proves nothing."""

    def __init__(self) -> None:
        super().__init__(self, "$JS.API", BufferConfig(log=LogConfig(replicas=3)))  # type: ignore[arg-type]
        self.alone = False
        self.asked: list[str] = []

    def on_connect(self, hook: Any) -> None: ...

    on_lost = on_forbidden = on_connect

    async def prove(self, unused: str, timeout_s: float) -> None:
        self.asked.append("proof")
        await asyncio.sleep(timeout_s if self.alone else 0.01)
        if self.alone:
            raise AppendUnknown("no answer")
        self.asked.append("proved")

    async def last(self, subjects: Sequence[str], timeout_s: float) -> dict[str, StoredMessage]:
        self.asked.append("last")
        return {SUBJECT: StoredMessage(SUBJECT, 7, "", b"")}


def test_a_leader_proves_that_it_leads_before_it_is_believed() -> None:
    async def main() -> None:
        log = Replicated()
        assert await log.latest(SUBJECT, 1.0) == 7
        assert log.asked == ["proof", "proved", "last"]
        log.alone = True
        with pytest.raises(LogUnavailable, match="prove"):
            await log.latest(SUBJECT, 1.0)
        with pytest.raises(LogUnavailable, match="prove"):
            await log.latest(SUBJECT, 10.0)
        assert log.asked.count("last") == 1
        await log.aclose()

    run(main())


def test_reads_at_the_same_time_share_one_proof() -> None:
    async def main() -> None:
        log = Replicated()
        assert await asyncio.gather(*(log.latest(SUBJECT, 1.0) for _ in range(100))) == [7] * 100
        assert log.asked.count("proof") == 1

    run(main())


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=30), st.integers(0, 20))
def test_a_shared_call_begins_after_all_who_get_its_answer_have_asked(
    asked: list[tuple[int, bool]], takes: int
) -> None:
    """Also when some of those who asked are cancelled, and when calls fail."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        running = 0

        async def call() -> float:
            nonlocal running
            began, running = loop.time(), running + 1
            assert running == 1, "one at a time"
            try:
                await asyncio.sleep(takes)
            finally:
                running -= 1
            if int(began) % 7 == 3:
                raise LogUnavailable(str(began))
            return began

        shared = SharedCall(call)

        async def ask(at: int, impatient: bool) -> None:
            await asyncio.sleep(at)
            try:
                async with asyncio.timeout(1 if impatient else None):
                    began = await shared()
            except TimeoutError:
                assert impatient
                return
            except LogUnavailable as e:
                began = float(str(e))
            assert at <= began <= at + takes, "not older than the question, and the next one at the latest"

        await asyncio.gather(*(ask(at, impatient) for at, impatient in asked))
        await shared.aclose()

    run(main())


def test_a_tail_of_one_who_lacks_what_was_proved_is_not_shown() -> None:
    """Who answers may be another one than he who told where the thread ends."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        config = BufferConfig(flusher=False, read_timeout_s=2.0)
        async with await BufferedThreadStore.open(inner, nats=nats, config=config) as store:
            for n in range(1, 4):
                await store.checkpoint(thread_id, list(range(n)), run_of(thread_id, steps=n))
            after, old = store.buffer.log.after, 5

            async def of_an_old_leader(*args: Any) -> list[StoredMessage]:
                nonlocal old
                old -= 1
                return (await after(*args))[: -2 if old > 0 else None]

            store.buffer.log.after = of_an_old_leader  # type: ignore[method-assign]
            assert await store.load_messages(thread_id) == [0, 1, 2]
            store._reads.store.down, old = "it is away", 5
            assert await store.load_messages(thread_id) == [0, 1, 2]
            old = 1 << 40
            with pytest.raises((ReadNotFresh, StoreUnavailable)):
                await store.load_messages(thread_id)

    run(main())


def test_an_edit_is_not_refused_because_of_what_an_old_leader_shows() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        config = BufferConfig(flusher=False)
        async with (
            await BufferedThreadStore.open(inner, nats=nats, config=config) as one,
            await BufferedThreadStore.open(inner, nats=nats, config=config) as two,
        ):
            await one.checkpoint(thread_id, ["a"], run_of(thread_id))
            last, old = two.buffer.log.last, 1

            async def of_an_old_leader(*args: Any) -> dict[str, StoredMessage]:
                nonlocal old
                old -= 1
                return {} if old >= 0 else await last(*args)

            two.buffer.log.last = of_an_old_leader  # type: ignore[method-assign]
            await two.delete_messages(thread_id)
            assert await one.load_messages(thread_id) == []
            with pytest.raises(NotFound):
                await two.delete_messages(fresh())

    run(main())
