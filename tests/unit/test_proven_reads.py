"""Reads of a replicated log: a node's answer counts only if it has proved that it leads, after it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import (
    BufferedThreadStore,
    Children,
    LogUnavailable,
    MemoryThreadStore,
    NotFound,
    ReadNotFresh,
    StoreUnavailable,
)
from bufstore.config import BufferConfig, LogConfig
from bufstore.jetstream.direct_gets import Shown
from bufstore.jetstream.messages import AppendUnknown, Outgoing, StoredMessage
from bufstore.memory import MemoryNats
from bufstore.nats.log import NatsLog
from bufstore.shared_call import SharedCall
from bufstore.threads.lineage import deletion
from helpers import fresh, run_of
from unit.fake_log import run

SUBJECT = "thread.groups.0"


class TwoLeaders(NatsLog):
    """A log that holds `log`, and nodes that each have its beginning up to some position.

    One node leads and has everything; `draw` decides which node answers a read. `proofs` counts stored proofs.
    """

    def __init__(
        self, draw: Callable[[int], int] = lambda nodes: 0, has: Sequence[int] = (), max_bytes: int = 1 << 30
    ) -> None:
        config = BufferConfig(log=LogConfig(replicas=3, max_bytes=max_bytes))
        super().__init__(self, "$JS.API", config)  # type: ignore[arg-type]
        self.log: list[str] = []
        self.alone = False
        self.proofs = 0
        self.reads = 0
        #: The end of each node that lags or was deposed; None: the node has everything.
        self.has: list[int | None] = [None, *has]
        self._draw = draw
        #: Subjects of others' writes between two requests.
        self.others: list[str] = []

    def on_connect(self, hook: Any) -> None: ...

    on_lost = on_connect

    def client(self) -> None: ...

    def end_of(self, subject: str, has: int | None = None) -> int:
        return max((n for n, s in enumerate(self.log[:has], 1) if s == subject), default=0)

    async def write(self, messages: Sequence[Outgoing], batch: None, timeout_s: float, *, again: bool) -> bytes:
        await asyncio.sleep(0.01)
        if self.alone:
            await asyncio.sleep(timeout_s)
            raise AppendUnknown("no answer")
        (message,) = messages
        self._others_write()
        if message.expected is not None and self.end_of(message.expected_of or "") != message.expected:
            return b'{"error": {"code": 400, "err_code": 10071, "description": "wrong last sequence"}}'
        self.log.append(message.subject)
        self.proofs += 1
        return b'{"seq": %d}' % len(self.log)

    def _others_write(self) -> None:
        if self.others:
            self.log.append(self.others.pop())

    def _answering(self) -> int | None:
        self.reads += 1
        return self.has[self._draw(len(self.has))]

    async def shown(self, subjects: Sequence[str], start: int, timeout_s: float) -> Shown:
        await asyncio.sleep(0.01)
        self._others_write()
        has = self._answering()
        found = sorted((end, s) for s in subjects if (end := self.end_of(s, has)) >= max(start, 1))
        part = found[: max(1, len(found) - self._draw(2))]  # as if there were no room for more
        messages = [StoredMessage(s, seq, None, b"") for seq, s in part]
        return Shown(messages, len(found) - len(part), len(self.log[:has]) if messages else 0)

    async def ends(self, filters: Sequence[str], timeout_s: float) -> list[int]:
        await asyncio.sleep(0.01)
        self._others_write()
        return [self.end_of(f, self._answering()) for f in filters]


@given(st.data())
def test_whoever_answers_a_read_shows_all_that_was_acknowledged_before(data: st.DataObject) -> None:
    """Replicas that lag and deposed leaders answer at random, and others write meanwhile."""

    async def main() -> None:
        subjects = [SUBJECT, "thread.parts.0", "thread.erased.0"]
        acked = data.draw(st.lists(st.sampled_from(subjects), max_size=20), label="acknowledged")
        has = data.draw(st.lists(st.integers(0, 20), max_size=2), label="what other nodes have")
        answering = data.draw(st.lists(st.integers(0, 2), max_size=40), label="who answers")
        log = TwoLeaders(lambda nodes: answering.pop() % nodes if answering else 0, has)
        log.log += acked
        log.others = data.draw(st.lists(st.sampled_from(subjects), max_size=10), label="written meanwhile")

        async def ask(at: float) -> None:
            await asyncio.sleep(at)
            before = log.end_of(SUBJECT)
            found = await log.fresh_end(60.0)
            assert before <= found <= log.end_of(SUBJECT)

        await asyncio.gather(*(ask(n / 200) for n in range(8)))
        await log.aclose()

    run(main())


def test_a_node_that_was_left_is_never_believed() -> None:
    """The proof comes from the leader, and each answer from a deposed leader."""

    async def main() -> None:
        log = TwoLeaders(lambda nodes: nodes - 1, has=[1])
        log.log += [SUBJECT, SUBJECT]
        with pytest.raises(LogUnavailable):
            await log.fresh_end(10.0)
        log.has = [None]
        assert await log.fresh_end(10.0) == 2
        await log.aclose()

    run(main())


def test_a_leader_proves_that_it_leads_before_it_is_believed() -> None:
    async def main() -> None:
        log = TwoLeaders()
        log.log.append(SUBJECT)
        assert await log.fresh_end(1.0) == 1
        assert (log.proofs, log.reads) == (1, 1)
        log.alone = True
        with pytest.raises(LogUnavailable, match="prove"):
            await log.fresh_end(1.0)
        with pytest.raises(LogUnavailable, match="prove"):
            await log.fresh_end(10.0)
        assert log.reads == 1
        await log.aclose()

    run(main())


def test_reads_at_the_same_time_share_one_proof_and_one_answer() -> None:
    async def main() -> None:
        log = TwoLeaders()
        log.log.append(SUBJECT)
        assert await asyncio.gather(*(log.fresh_end(1.0) for _ in range(100))) == [1] * 100
        assert (log.proofs, log.reads) == (1, 1)
        await log.aclose()

    run(main())


def test_old_proofs_go_and_the_last_stays() -> None:
    async def main() -> None:
        log, purged = TwoLeaders(max_bytes=1 << 20), list[int]()

        async def api(verb: str, body: dict[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:
            assert (verb, body["filter"]) == ("STREAM.PURGE.THREADLOG", "thread.proof.0")
            purged.append(body["seq"])
            assert 100 < len(log.log) - purged[-1] < 200, "all together take little of the log"
            return {}

        log.api = api  # type: ignore[assignment]
        for _ in range(1100):
            await log.fresh_end(1.0)
        assert len(purged) == 4
        await log.aclose()

    run(main())


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=30), st.integers(0, 20))
def test_a_shared_call_begins_after_all_who_get_its_answer_have_asked(
    asked: list[tuple[int, bool]], takes: int
) -> None:
    """Some callers are cancelled, and some calls fail."""

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


async def test_a_shared_call_that_was_ended_before_it_began_ends_no_later_one() -> None:
    """Regression: every later caller got what had ended that one."""

    async def call() -> int:
        return 1

    shared = SharedCall(call)
    asking = asyncio.ensure_future(shared())
    await asyncio.sleep(0)
    assert shared._next is not None
    shared._next.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert await shared() == 1
    await shared.aclose()


def test_a_tail_of_one_who_lacks_what_was_proved_is_not_shown() -> None:
    """The tail may come from another node than the thread's end."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        config = BufferConfig(flusher=False, read_timeout_s=2.0)
        async with await BufferedThreadStore.open(inner, nats=nats, config=config) as store:
            for n in range(1, 4):
                await store.checkpoint(thread_id, list(range(n)), run_of(thread_id, steps=n))
            after, old = store.buffer.log.seen_after, 5

            async def of_an_old_leader(*args: Any) -> dict[str, list[StoredMessage]]:
                nonlocal old
                old -= 1
                return {s: found[: -2 if old > 0 else None] for s, found in (await after(*args)).items()}

            store.buffer.log.seen_after = of_an_old_leader  # type: ignore[method-assign]
            assert await store.load_messages(thread_id) == [0, 1, 2]
            store.buffer.reads._recent.forget(thread_id)
            store.buffer.reads.store.down, old = "it is away", 5
            assert await store.load_messages(thread_id) == [0, 1, 2]
            store.buffer.reads._recent.forget(thread_id)
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
            log: Any = two.buffer.log
            ends, latest, asked, proved = log.ends, log.latest, 0, False

            async def of_an_old_leader(subjects: Sequence[str]) -> list[int]:
                nonlocal asked
                asked += not proved
                return await ends(subjects) if proved else [0] * len(subjects)

            async def of_the_leader(*args: Any) -> int:
                nonlocal proved
                proved = True
                return await latest(*args)  # type: ignore[no-any-return]

            log.ends, log.latest = of_an_old_leader, of_the_leader
            await two.delete_messages(thread_id)
            assert asked and proved
            assert await one.load_messages(thread_id) == []
            with pytest.raises(NotFound):
                await two.delete_messages(fresh())

    run(main())


@pytest.mark.parametrize("what", ["delete", "set parent", "name a parent", "delete in bulk"])
def test_no_change_of_lineage_is_refused_because_of_what_an_old_leader_shows(what: str) -> None:
    """Regression: a thread that was acknowledged was not there, and a deletion of it in bulk did nothing."""

    async def main() -> None:
        nats, inner, thread_id, other = MemoryNats(), MemoryThreadStore(), fresh(), fresh()
        config = BufferConfig(flusher=False)
        async with (
            await BufferedThreadStore.open(inner, nats=nats, config=config) as one,
            await BufferedThreadStore.open(inner, nats=nats, config=config) as two,
        ):
            await one.checkpoint(thread_id, ["a"], run_of(thread_id))
            await one.checkpoint(other, ["a"], run_of(other))
            log: Any = two.buffer.log
            ends, told, asked, proved = log.ends, log.latest_partition_ends, 0, False

            async def of_an_old_leader(subjects: Sequence[str]) -> list[int]:
                nonlocal asked
                asked += not proved
                return await ends(subjects) if proved else [0] * len(subjects)

            async def of_the_leader(*args: Any) -> Any:
                nonlocal proved
                proved = True
                return await told(*args)

            log.ends, log.latest_partition_ends = of_an_old_leader, of_the_leader
            async with AsyncExitStack() as stack:
                match what:
                    case "delete":
                        await stack.enter_async_context(flushing(inner, nats))
                        await two.delete_thread(thread_id, children=Children.DETACH)
                    case "set parent":
                        await two.set_parent(thread_id, other)
                    case "name a parent":
                        child = fresh()
                        await two.checkpoint(child, ["b"], run_of(child, parent_thread_id=thread_id))
                    case "delete in bulk":
                        await stack.enter_async_context(flushing(inner, nats))
                        assert await two.bulk.delete(deletion(thread_id, Children.DETACH), None) is False
            assert asked and proved
            there = await one.load_thread(thread_id)
            assert (there is None) == ("delete" in what)
            if what == "set parent":
                assert there is not None and there.parent_thread_id == other
            with pytest.raises(NotFound):
                await two.set_parent(fresh(), other)

    run(main())


@asynccontextmanager
async def flushing(inner: MemoryThreadStore, nats: MemoryNats) -> AsyncIterator[None]:
    """Another process, which flushes: a deletion waits for that."""
    async with await BufferedThreadStore.open(inner, nats=nats, config=BufferConfig(lease_s=4)):
        yield
