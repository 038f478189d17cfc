"""How long the log has room, what a full log says, and what a health check reports then."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import BufferedThreadStore, MemoryThreadStore
from bufstore.buffer.operate.health import health_of
from bufstore.buffer.operate.log_fill import LogFill, full_in_s, why_full
from bufstore.buffer.ports.waiting import WaitingTotals
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import ConfigError, LogFull, StoreUnavailable
from bufstore.jetstream.messages import Held
from bufstore.memory import MemoryNats
from helpers import fresh, run_of
from unit.fake_log import run

LIMIT = 2 << 30
#: Messages of 2500 bytes that are written per second.
RATE = 1000


def fill(at: float, unflushed: float, flushed: float = 0) -> LogFill:
    """The log's fill at `RATE`, with so many seconds' messages unflushed, and flushed."""
    messages = round(RATE * (unflushed + flushed))
    above = Counter({0: round(RATE * unflushed)})
    return LogFill(at, Held(2500 * messages, LIMIT, above, 2500 * above[0], round(RATE * at)))


@given(began=st.integers(0, 100), seconds=st.integers(7, 600), flushed=st.floats(0, 200), every=st.integers(1, 100))
def test_an_outage_is_told_by_the_growth_since_the_look_before(
    began: int, seconds: int, flushed: float, every: int
) -> None:
    """Nothing is flushed from `began` on; before that everything is."""
    looks = [fill(at, max(0, at - began), flushed) for at in range(0, began + seconds, every)]
    now = fill(began + seconds, seconds, flushed)
    found = full_in_s(looks, now)
    if any(look.at >= began and 5 <= now.at - look.at <= 120 for look in looks):
        left = LIMIT / 2500 / RATE - flushed - seconds
        assert found == pytest.approx(max(0, left), rel=0.01, abs=1)


@given(lags=st.lists(st.floats(0, 4.9), min_size=2, max_size=60), flushed=st.floats(0, 500))
def test_a_flusher_that_keeps_up_is_no_growth(lags: list[float], flushed: float) -> None:
    looks = [fill(10 + at, lag, flushed) for at, lag in enumerate(lags)]
    assert full_in_s(looks[:-1], looks[-1]) is None


def test_what_shrinks_again_is_not_said_to_grow() -> None:
    looks = [fill(at, min(at, 60)) for at in range(0, 90, 5)]
    assert full_in_s(looks, fill(90, 30)) is None


def test_looks_of_long_ago_or_of_the_same_moment_tell_nothing() -> None:
    assert full_in_s([], fill(0, 1)) is None
    assert full_in_s([fill(0, 0)], fill(121, 121)) is None
    assert full_in_s([fill(99.5, 0)], fill(100, 100)) is None
    assert full_in_s([fill(95, 0)], fill(100, 100)) is not None


def test_a_log_beyond_its_limit_is_full_now() -> None:
    assert full_in_s([fill(0, 900)], fill(100, 1000)) == 0


def test_a_full_log_says_what_takes_the_room_and_what_to_do() -> None:
    unflushed = why_full("the log is full", LogFill(0, Held(1000, 1000, Counter({0: 8}), 800, 10)))
    assert "holds 1000 of 1000 bytes, about 800 of them not flushed" in unflushed
    assert "health()" in unflushed
    flushed = why_full("the log is full", LogFill(0, Held(1000, 1000, Counter({0: 1}), 100, 10)))
    assert (
        "about 100 of them not flushed; the rest is flushed, but stays in the log for LogConfig.failover_window_s"
        in flushed
    )


# --- on a store ---------------------------------------------------------------------------------------------------


def store(nats: MemoryNats, inner: MemoryThreadStore, **config: Any) -> Any:
    log = LogConfig(max_bytes=1 << 20)
    return BufferedThreadStore.open(inner, nats=nats, config=BufferConfig(log=log, **config))


def away(inner: MemoryThreadStore) -> None:
    """Let Postgres no longer answer."""

    async def fails(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("Postgres is away")

    for name in ("cursors", "flush", "take", "watermark", "watermarks"):
        setattr(inner.ledger(0), name, fails)


async def write_for(it: BufferedThreadStore, seconds: int) -> None:
    for n in range(seconds):
        await it.checkpoint(thread_id := fresh(), [n, "x" * 5000], run_of(thread_id))
        await asyncio.sleep(1)


def test_statistics_say_when_the_log_will_be_full() -> None:
    async def main() -> None:
        inner = MemoryThreadStore()
        async with await store(MemoryNats(), inner) as it:
            await write_for(it, 30)
            found = await it.statistics()
            await write_for(it, 10)
            assert (await it.statistics()).log_full_in_s is None, "all is flushed in time"
            assert found.log_bytes_unflushed < 3 * 5500
            assert found.log_bytes > 25 * 5000
            away(inner)
            began = asyncio.get_running_loop().time()
            await write_for(it, 30)
            await it.statistics()
            await write_for(it, 10)
            found = await it.statistics()
            assert 40 * 5000 < found.log_bytes_unflushed < 43 * 5500
            assert found.log_full_in_s is not None
            with pytest.raises(LogFull) as caught:
                await write_for(it, 3600)
            lasted = asyncio.get_running_loop().time() - began - 40
            assert lasted == pytest.approx(found.log_full_in_s, abs=3), (
                "nothing was flushed long enough ago to make room"
            )
            unflushed = (await it.statistics()).log_bytes_unflushed
            assert f"about {unflushed} of them not flushed; slow down" in str(caught.value)

    run(main())


def test_a_log_that_nobody_flushes_says_so() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with await store(nats, inner, flusher=False) as writer:
            with pytest.raises(LogFull, match="not flushed; slow down"):
                await write_for(writer, 3600)
            health = await writer.health()
            assert (health.can_write, health.can_read, health.flushing) == (False, True, False)
            assert "full" in health.write_trouble
            assert "no flusher is alive" in health.flush_trouble
            async with await store(nats, inner):
                await writer.force_flush_all()
                assert (await writer.health()).flushing
                await asyncio.sleep(2)
                with pytest.raises(LogFull, match="the rest is flushed, but stays in the log"):
                    await write_for(writer, 50)
                await asyncio.sleep(120)
                await write_for(writer, 1)
                assert (await writer.health()).ok

    run(main())


def test_an_app_can_write_while_postgres_is_away() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with await store(nats, inner) as it:
            health = await it.health()
            assert (health.ok, health.can_write, health.can_read, health.flushing) == (True, True, True, True)
            away(inner)
            await write_for(it, 3)
            health = await it.health()
            assert (health.ok, health.can_write, health.can_read, health.flushing) == (False, True, False, False)
            assert "Postgres is away" in health.read_trouble
            assert "Postgres is away" in health.flush_trouble

    run(main())


@pytest.mark.parametrize(("log", "store", "flusher", "full", "flushers"), [*product(*4 * [("", "x")], (True, False))])
def test_each_ability_has_its_reason(log: str, store: str, flusher: str, full: str, flushers: bool) -> None:
    health = health_of(log=log, store=store, flusher=flusher, full=full, flushers=flushers)
    assert health.can_write == (not log and not full)
    assert health.can_read == (not log and not store)
    assert health.flushing == (not log and not store and not flusher and flushers)
    assert health.ok == (health.can_write and health.can_read and health.flushing)


def test_what_waits_is_told_beside_the_flushers_trouble() -> None:
    since = datetime(2026, 1, 1, tzinfo=UTC)
    waiting = WaitingTotals(entries=4, threads=1, bytes=100, since=since, reason="its row is held")
    told = health_of(log="", store="", flusher="flusher a: 1 thread has to wait", waiting=waiting).flush_trouble
    assert told == f"flusher a: 1 thread has to wait; entries wait: {waiting}"
    assert health_of(log="", store="", flusher="", waiting=waiting).flush_trouble == f"entries wait: {waiting}"
    assert health_of(log="", store="", flusher="", waiting=WaitingTotals()).ok


def test_no_entry_may_be_larger_than_its_log_can_hold() -> None:
    """The default becomes smaller, so that a small log needs no second option."""
    assert LogConfig().entry_bytes_max == 64 << 20
    assert LogConfig(max_bytes=16 << 20).entry_bytes_max == 15 << 20
    assert LogConfig(max_bytes=16 << 20, max_entry_bytes=15 << 20).entry_bytes_max == 15 << 20
    with pytest.raises(ConfigError, match=r"max_entry_bytes \(20971520\) must be at most 15/16 .* \(15728640\)"):
        LogConfig(max_bytes=16 << 20, max_entry_bytes=20 << 20)
