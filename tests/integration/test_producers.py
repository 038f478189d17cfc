"""Writes that a source numbers: once, whoever repeats them, however much later, on real servers and in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from bufstore import (
    BufferConfig,
    BufferedThreadStore,
    Consistency,
    InvalidRecord,
    MemoryThreadStore,
    OutcomeUnknown,
    ProducerSequence,
    Run,
)
from bufstore.jetstream.messages import AppendUnknown, Outgoing
from bufstore.memory import MemoryNats
from conftest import Deployment
from helpers import eventually

Opener = Callable[..., AbstractAsyncContextManager[BufferedThreadStore]]


def run_of(thread_id: str) -> Run:
    return Run(run_id=f"run-{thread_id}", thread_id=thread_id)


@pytest.fixture(params=["memory", "servers"])
def opened(request: pytest.FixtureRequest) -> Opener:
    """Opens an instance; all of them share log and store."""
    if request.param == "servers":
        deployment: Deployment = request.getfixturevalue("deployment")
        return deployment.store
    nats, inner = MemoryNats(), MemoryThreadStore()

    @asynccontextmanager
    async def in_memory(**options: Any) -> AsyncIterator[BufferedThreadStore]:
        config = BufferConfig(**({"flush_interval_s": 0.05, "lease_s": 4} | options))
        async with await BufferedThreadStore.open(inner, nats=nats, config=config) as store:
            yield store

    return in_memory


async def test_a_number_is_written_once_and_its_repeat_gets_a_receipt(opened: Opener) -> None:
    async with opened() as store:
        first = await store.checkpoint_append("t", ["a"], run_of("t"), producer=ProducerSequence("q", 1))
        again = await store.checkpoint_append("t", ["a"], run_of("t"), producer=ProducerSequence("q", 1))
        assert not first.repeated
        assert again.repeated
        assert (again.thread_seq, again.version) == (first.thread_seq, first.version)
        await store.checkpoint_append("t", ["b"], run_of("t"), producer=ProducerSequence("q", 5))
        late = await store.checkpoint("t", ["x"], run_of("t"), producer=ProducerSequence("q", 4))
        assert late.repeated, "below the highest number is a repeat as well"
        assert not (
            await store.checkpoint_append("t", ["c"], run_of("t"), producer=ProducerSequence("other", 1))
        ).repeated
        assert await store.load_messages("t") == ["a", "b", "c"]


async def test_a_repeat_is_known_in_another_process_long_after_the_key_ring_has_forgotten(opened: Opener) -> None:
    async with opened() as store:
        await store.checkpoint("t", ["first"], run_of("t"), producer=ProducerSequence("q", 7))
        for n in range(40):
            await store.checkpoint_append("t", [n], run_of("t"))
        await store.force_flush_all()
    async with opened() as store:
        assert (await store.checkpoint("t", ["first"], run_of("t"), producer=ProducerSequence("q", 7))).repeated
        assert not (
            await store.checkpoint_append("t", ["next"], run_of("t"), producer=ProducerSequence("q", 8))
        ).repeated
        assert (await store.load_messages("t") or [])[-1] == "next"


async def test_a_repeat_is_known_when_only_the_store_remembers(opened: Opener) -> None:
    async with opened() as store:
        await store.checkpoint("t", ["first"], run_of("t"), producer=ProducerSequence("q", 7))
        partition = store.buffer.subjects.partition("t")
        behind = next(f"u{n}" for n in range(1000) if store.buffer.subjects.partition(f"u{n}") == partition)
        last = await store.checkpoint(behind, ["x"], run_of(behind))
        await store.force_flush_all()
        await store.buffer.log.purge(partition, last.thread_seq)  # as retention does, later
    async with opened() as store:
        assert (await store.checkpoint("t", ["first"], run_of("t"), producer=ProducerSequence("q", 7))).repeated
        assert (await store.checkpoint_append("t", ["x"], run_of("t"), producer=ProducerSequence("q", 6))).repeated
        await store.checkpoint_append("t", ["second"], run_of("t"), producer=ProducerSequence("q", 8))
        assert await store.load_messages("t") == ["first", "second"]


async def test_a_repeated_batch_does_not_bring_a_deleted_thread_back(opened: Opener) -> None:
    async with opened() as store:
        await store.checkpoint("t", ["first"], run_of("t"), producer=ProducerSequence("q", 1))
        await store.delete_thread("t")
        await store.force_flush_all()
    async with opened() as store:
        assert (await store.checkpoint("t", ["first"], run_of("t"), producer=ProducerSequence("q", 1))).repeated
        assert await store.load_messages("t") is None
        assert not (await store.checkpoint("t", ["new"], run_of("t"), producer=ProducerSequence("q", 2))).repeated
        assert await store.load_messages("t") == ["new"]


async def test_key_and_source_together_are_refused_before_anything_is_written(opened: Opener) -> None:
    async with opened() as store:
        with pytest.raises(InvalidRecord):
            await store.checkpoint("t", ["a"], run_of("t"), idempotency_key="k", producer=ProducerSequence("q", 1))
        assert await store.load_messages("t") is None


async def test_batches_repeated_by_several_processes_at_once_take_effect_once(opened: Opener) -> None:
    chance = random.Random(5)
    threads = [f"t{n}" for n in range(6)]
    batches = [[(chance.choice(threads), f"{b}.{row}") for row in range(12)] for b in range(6)]
    async with opened() as one, opened() as two:
        stores = [one, two]

        async def sink(number: int, store: BufferedThreadStore) -> None:
            for row, (thread_id, text) in enumerate(batches[number]):
                mark = ProducerSequence("query", number << 32 | row)
                await store.checkpoint_append(thread_id, [text], run_of(thread_id), producer=mark)

        for number in range(len(batches)):
            # The same batch by two executors at once, and again before the next one.
            await asyncio.gather(*(sink(number, store) for store in stores))
            await sink(number, chance.choice(stores))
            if chance.random() < 0.5:
                await one.force_flush_all()
        for thread_id in threads:
            wanted = [text for batch in batches for t, text in batch if t == thread_id]
            assert (await two.load_messages(thread_id) or []) == wanted


async def test_what_is_learnt_of_many_threads_at_once_is_right_and_saves_asking(
    deploy: Callable[..., Deployment],
) -> None:
    """Of each kind one: new, in the log, flushed and purged, deleted, and written by another in between."""
    deployment = deploy(failover_window_s=1.0)
    deployment.verified = False
    kinds = ("new", "logged", "flushed", "deleted", "raced")
    short = {"retain_after_flush_s": 1.0}
    async with deployment.store(**short) as store:
        for t in ("flushed", "deleted", "later"):
            await store.checkpoint_append(t, ["before"], run_of(t), idempotency_key=t)
        await store.delete_thread("deleted")
        await store.force_flush_all(timeout_s=30)
        for n in range(3):  # the entry at a cursor stays: others behind them, so that theirs go
            for t in range(32):
                await store.checkpoint_append(f"other-{t}", [n], run_of(f"other-{t}"), idempotency_key=f"{t}-{n}")
            await store.force_flush_all(timeout_s=30)

        async def purged() -> bool:
            names = await store.buffer.log.subjects(f"{deployment.name}.*.*", 0)
            return not any(store.buffer.subjects.of(t) in names for t in ("flushed", "deleted"))

        await eventually(purged)
    await deployment.change(failover_window_s=60.0)
    async with deployment.store(flusher=False) as one, deployment.store(flusher=False) as other:
        await other.checkpoint_append("logged", ["before"], run_of("logged"))
        before = one.buffer.session.traffic[0]
        await one.bulk.learn_new([*kinds, *(f"n{i}" for i in range(200))])
        assert one.buffer.session.traffic[0] - before < 4, "a few requests for all of them"
        await other.checkpoint_append("raced", ["before"], run_of("raced"))
        for t in kinds:
            await one.checkpoint_append(t, ["after"], run_of(t), producer=ProducerSequence("q", 1))
            again = await one.checkpoint_append(t, ["after"], run_of(t), producer=ProducerSequence("q", 1))
            assert again.repeated
    async with deployment.store() as store:
        await store.force_flush_all()
        assert await store.quarantined() == 0
        held = {t: await store.load_messages(t) for t in kinds}
    with_before = {t: ["before", "after"] for t in ("logged", "flushed", "raced")}
    assert held == with_before | {"new": ["after"], "deleted": ["after"]}


@pytest.mark.parametrize("flushed", [False, True], ids=["before the flush", "after the flush"])
@pytest.mark.parametrize("how", ["token", "source"])
async def test_a_repeat_of_what_landed_too_late_is_written(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, how: str, flushed: bool
) -> None:
    """Others' entries were flushed and purged before it landed: the flush passes over it."""
    producer = ProducerSequence("q", 1) if how == "source" else None
    async with (
        opened() as flusher,
        opened(flusher=False, append_timeout_s=1.0) as one,
        opened(flusher=False) as two,
    ):
        partition = flusher.buffer.subjects.partition("t")
        beside = next(t for n in range(99) if flusher.buffer.subjects.partition(t := f"o{n}") == partition)

        async def leave_the_log() -> None:
            await flusher.checkpoint_append(beside, [0], run_of(beside))  # the entry at a cursor stays
            await flusher.force_flush_all()
            await flusher.buffer.log.purge(partition, await flusher.buffer.log.end(5))

        await flusher.checkpoint("t", ["m0"], run_of("t"))
        await leave_the_log()
        sent: list[Outgoing] = []

        async def held_up(message: Outgoing, timeout_s: float) -> int:
            sent.append(message)
            raise AppendUnknown("no answer")

        publish = one.buffer.log.publish
        monkeypatch.setattr(one.buffer.log, "publish", held_up)
        with pytest.raises(OutcomeUnknown) as unknown:
            await one.checkpoint_append("t", ["mine"], run_of("t"), producer=producer)
        await flusher.checkpoint_append("t", ["theirs"], run_of("t"))
        await leave_the_log()
        await publish(sent[0], 5)
        if flushed:
            await flusher.force_flush_all()
        # Not before: it may be about to send its entry once more.
        monkeypatch.undo()
        key = unknown.value.token if producer is None else None
        receipts = [
            await store.checkpoint_append("t", ["mine"], run_of("t"), idempotency_key=key, producer=producer)
            for store in (two, one, flusher)
        ]
        assert [r.repeated for r in receipts] == [False, True, True]
        assert await two.load_messages("t", consistency=Consistency.STRONG) == ["m0", "theirs", "mine"]
        assert await flusher.quarantined() == 0
        report = await flusher.verify()
        assert report.ok, report.findings
