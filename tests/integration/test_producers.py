"""Writes numbered by their source take effect once, whoever repeats them and however late; on servers and in memory."""

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
    VersionConflict,
)
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing
from bufstore.memory import MemoryNats
from conftest import Deployment
from helpers import let_all_go

Opener = Callable[..., AbstractAsyncContextManager[BufferedThreadStore]]


def run_of(thread_id: str) -> Run:
    return Run(run_id=f"run-{thread_id}", thread_id=thread_id)


@pytest.fixture(params=["memory", "servers"])
def opened(request: pytest.FixtureRequest) -> Opener:
    """A function that opens instances on one log and store."""
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
        await let_all_go(store)
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
            # Two executors write the same batch at the same time, and one repeats it before the next batch.
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
    """One thread of each kind: new, in the log, flushed and purged, deleted, and written by another one meanwhile."""
    deployment = deploy(failover_window_s=8.0)
    deployment.verified = False
    kinds = ("new", "logged", "flushed", "deleted", "raced")
    async with deployment.store(retain_after_flush_s=8.0) as store:
        for t in ("flushed", "deleted", "later"):
            await store.checkpoint_append(t, ["before"], run_of(t), idempotency_key=t)
        await store.delete_thread("deleted")
        await store.force_flush_all(timeout_s=30)
        await let_all_go(store)
    await deployment.change(failover_window_s=60.0)
    async with deployment.store(flusher=False) as one, deployment.store(flusher=False) as other:
        await other.checkpoint_append("logged", ["before"], run_of("logged"))
        assert await one.load_thread("logged") is not None  # it follows the log from now on
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


async def test_nothing_is_refused_because_of_what_was_learnt_before_it_came(opened: Opener) -> None:
    async with opened(flusher=False) as one, opened(flusher=False) as other:
        await one.bulk.learn_new(["t"])
        await other.checkpoint_append("t", ["theirs"], run_of("t"))
        await one.checkpoint_append("t", ["mine"], run_of("t"), expected_version=1)
        assert await other.load_messages("t") == ["theirs", "mine"]
        await one.bulk.learn_new(["never"])
        with pytest.raises(VersionConflict):
            await one.checkpoint_append("never", ["mine"], run_of("never"), expected_version=1)


@pytest.mark.parametrize("how", ["token", "source"])
async def test_a_repeat_of_what_was_held_up_is_written_once(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A message is delayed until later entries are flushed and purged: it is never stored, only its repeat is."""
    producer = ProducerSequence("q", 1) if how == "source" else None
    async with (
        opened() as flusher,
        opened(flusher=False, append_timeout_s=4.0) as one,
        opened(flusher=False) as two,
    ):
        await flusher.checkpoint("t", ["m0"], run_of("t"))
        await let_all_go(flusher)
        sent: list[Outgoing] = []

        async def held_up(message: Outgoing, timeout_s: float) -> int:
            sent.append(message)
            raise AppendUnknown("no answer")

        stream = one.buffer.log._stream  # type: ignore[attr-defined]
        publish = stream.publish
        monkeypatch.setattr(stream, "publish", held_up)
        with pytest.raises(OutcomeUnknown) as unknown:
            await one.checkpoint_append("t", ["mine"], run_of("t"), producer=producer)
        await flusher.checkpoint_append("t", ["theirs"], run_of("t"))
        await let_all_go(flusher)
        assert len({(m.header, m.body, m.expected) for m in sent}) == 1, "the same again, behind the same"
        with pytest.raises(Conflict):
            await publish(sent[0], 5)
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
