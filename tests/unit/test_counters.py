"""A domain of a few lines gets the whole buffer, which knows nothing of threads."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bufstore import BufferedThreadStore, ConfigDrift, Consistency, FlushTimeout, MemoryThreadStore, ThreadQuarantined
from bufstore.buffer.operate.repair import Repair
from bufstore.buffer.operate.replay import Outcome
from bufstore.config import BufferConfig, LogConfig
from bufstore.memory import MemoryNats
from helpers import eventually
from unit.counters import CounterStore, adding, setting

CONFIG = BufferConfig(log=LogConfig(partitions=2), flush_interval_s=0.01)


async def test_a_counter_is_appended_to_flushed_read_and_verified() -> None:
    store, nats = CounterStore(), MemoryNats()
    one, two = await store.buffer(nats, CONFIG).open(), await store.buffer(nats, CONFIG).open()
    try:
        for n in range(20):
            writer = (one, two)[n % 2]
            await writer.appender.append(f"key {n % 3}", adding(n) if n > 2 else setting(n))
        for level in (Consistency.READ_YOUR_WRITES, Consistency.STRONG):
            found = [(await two.reads.thread(f"key {k}", level)).value for k in range(3)]
            assert found == [sum(range(k, 20, 3)) for k in range(3)]
        repeated = [await one.appender.append("once", adding(5), key="k", content=b"5") for _ in range(2)]
        assert [r.repeated for r in repeated] == [False, True]
        await one.force_flush_all()
        assert store.values["once"] == 5
        assert sum(store.values.values()) == sum(range(20)) + 5
        assert (await two.verify()).ok
        assert max((await one.vitals.lag()).values()) == 0
        assert (await one.vitals.health()).ok
        assert (await one.vitals.statistics()).appended > 0
    finally:
        await two.aclose()
        await one.aclose()


async def test_what_a_store_refuses_is_parked_and_replayed() -> None:
    store = CounterStore()
    it = await store.buffer(MemoryNats(), CONFIG).open()
    try:
        await it.appender.append("a", setting(1))
        await it.force_flush_all()
        store.refused = {13}
        parked = await it.appender.append("a", adding(12))
        await it.appender.append("b", setting(7))
        await it.force_flush_all()
        assert store.values == {"a": 1, "b": 7}
        with pytest.raises(ThreadQuarantined):
            await it.reads.thread("a", Consistency.READ_YOUR_WRITES)
        assert [p.seq for p in await it.quarantine.page()] == [parked.thread_seq]
        store.refused = set()
        assert [r.outcome for r in await it.quarantine.replay(parked.thread_seq)] == [Outcome.APPLIED]
        assert (await it.reads.thread("a", Consistency.READ_YOUR_WRITES)).value == 13
        assert store.values == {"a": 13, "b": 7}
        assert (await it.verify()).ok
    finally:
        await it.aclose()


async def test_a_store_that_went_back_is_repaired_from_the_log() -> None:
    store, nats = CounterStore(), MemoryNats()
    it = await store.buffer(nats, CONFIG).open()
    await it.appender.append("a", setting(1))
    await it.force_flush_all()
    await it.aclose()
    went_back, epoch, target = CounterStore(), await store.ledger.epoch(), await store.ledger.target()
    assert epoch is not None
    assert target is not None
    await went_back.ledger.claim(epoch, target)
    ill = went_back.buffer(nats, BufferConfig(log=CONFIG.log, flusher=False))
    async with ill.connected():
        await ill.log.epoch()
        done = await Repair(ill.parts, "Postgres went back").carry_out()
    assert (done.done, done.applied, done.parked) == (True, 1, 0)
    assert went_back.values == {"a": 1}
    mended = await went_back.buffer(nats, CONFIG).open()
    try:
        await mended.appender.append("a", adding(1))
        await mended.force_flush_all()
        assert went_back.values == {"a": 2}
    finally:
        await mended.aclose()


async def test_what_waits_is_read_and_a_repair_keeps_its_place() -> None:
    """The log loses its end while a counter's entries wait, and with it another counter's entries."""
    store, nats = CounterStore(), MemoryNats()
    it = await store.buffer(nats, CONFIG).open()
    for key in ("a", "b"):
        await it.appender.append(key, setting(1))
    await it.force_flush_all()
    store.ledger.locked.add("a")
    for _ in range(3):
        await it.appender.append("a", adding(10))

    async def all_wait() -> bool:
        return len(await store.ledger.waiting.of_thread("a")) == 3

    await eventually(all_wait)
    assert (await it.reads.thread("a", Consistency.READ_YOUR_WRITES)).value == 31
    assert (await it.verify()).waiting == 3
    with pytest.raises(FlushTimeout):
        await it.force_flush("a", timeout_s=0.1)
    await it.flusher.aclose()  # type: ignore[union-attr]
    await it.appender.append("a", adding(100))
    await it.aclose()
    store.ledger.locked.clear()
    went_back = store.buffer(nats, BufferConfig(log=CONFIG.log, flusher=False))
    async with went_back.connected():
        await went_back.log.epoch()
        look = await Repair(went_back.parts, "to see what it does").look()
        assert store.values == {"a": 1, "b": 1}
        done = await Repair(went_back.parts, "to see what it does").carry_out()
    assert (look.applied, look.parked) == (done.applied, done.parked) == (1, 0)
    assert store.values == {"a": 131, "b": 1}
    assert store.ledger.waiting.entries == {}
    mended = await store.buffer(nats, CONFIG).open()
    try:
        await mended.appender.append("a", adding(1))
        await mended.force_flush_all()
        assert store.values["a"] == 132
        assert (await mended.verify()).ok
    finally:
        await mended.aclose()


async def test_a_log_of_threads_is_not_taken_for_one_of_counters() -> None:
    nats = MemoryNats()
    await (await BufferedThreadStore.open(MemoryThreadStore(), nats=nats, config=CONFIG)).aclose()
    with pytest.raises(ConfigDrift, match="domain"):
        await CounterStore().buffer(nats, CONFIG).open()


def test_it_is_small_and_knows_no_threads() -> None:
    source = Path(__file__).with_name("counters.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 150
    imported = {n.module for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)}
    assert not [m for m in imported if m and m.startswith("bufstore.threads")]
