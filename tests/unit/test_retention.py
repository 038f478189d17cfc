"""How long an outage of Postgres may last: the flusher on a log in memory, in virtual time, with the defaults."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from bufstore.buffer.ports.ledger import Cursor
from bufstore.config import LogConfig
from bufstore.errors import LogFull, LogUnavailable, StoreUnavailable
from unit.test_flusher import SUBJECTS, Bench, bench, went_back

#: With this many entries per second, a log of 1 MiB fills as one of 2 GiB, the default, does with 1000.
LOG = LogConfig(partitions=4, max_bytes=1 << 20)
RATE = 1000 * LOG.max_bytes / LogConfig().max_bytes
CHECKPOINT = "x" * 2048
PARTITION_OF = {thread_id: SUBJECTS.partition(thread_id) for thread_id in ("t", "u")}


def away(it: Bench) -> None:
    """Let Postgres no longer answer."""

    async def fails(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("Postgres is away")

    for name in ("cursors", "flush", "take", "tombstones", "bury", "archived"):
        setattr(it.ledger, name, fails)


async def writes(it: Bench, seconds: float) -> float:
    """Write at `RATE` for so long, or until the log is full. Returns how long that was."""
    loop = asyncio.get_running_loop()
    began, n = loop.time(), 0
    while (passed := loop.time() - began) < seconds:
        try:
            await it.writer.append([CHECKPOINT], f"t{n % 40}")
        except LogFull:
            return passed
        n += 1
        await asyncio.sleep(began + n / RATE - loop.time())
    return passed


async def filled(it: Bench, part: float, within_s: float) -> float:
    """Write until so much of the log is full, or for so long. Returns how full it is."""
    it.log.stream.config = LOG
    await it.start()
    while within_s > 0 and it.log.stream.bytes < part * LOG.max_bytes:
        await writes(it, 20)
        within_s -= 20
    return it.log.stream.bytes / LOG.max_bytes


@pytest.mark.long
def test_at_the_defaults_the_log_takes_thirteen_minutes_without_postgres() -> None:
    async def main(it: Bench) -> None:
        found = await filled(it, 0.65, 900)
        away(it)
        lasted = await writes(it, 3600)
        assert lasted > 750, f"full after {lasted:.0f} s, was full to {found:.0%} when Postgres went away"
        assert found > 0.15, "what is flushed is retained as far as the reserve allows"

    bench(main)


@pytest.mark.long
def test_what_a_postgres_that_is_away_confirmed_before_makes_room() -> None:
    """Even if all of the log may be retained, what was confirmed a failover window ago is safe for good."""

    async def main(it: Bench) -> None:
        assert await filled(it, 0.65, 900) > 0.65
        away(it)
        assert await writes(it, 3600) > 750
        await asyncio.sleep(60)
        assert it.flusher is not None
        for owned in it.flusher._owned.values():
            assert owned.passed.purged < owned.cursor.seq, "the last of it may be missing in the copy that takes over"

    bench(main, outage_reserve=0.01)


@pytest.mark.long
def test_an_owner_that_restarts_in_an_outage_has_the_reserve() -> None:
    """The owner cannot take its partitions, so nobody purges them: only the room that was free before is left."""

    async def main(it: Bench) -> None:
        await filled(it, 0.65, 900)
        away(it)
        await it.stop()
        await it.start()
        assert await writes(it, 3600) > 650

    bench(main)


def test_nothing_is_purged_that_a_restored_postgres_lacks_whatever_was_said_before() -> None:
    """What an owner said of a partition is in the shared state, and was true of the Postgres before."""

    async def main(it: Bench) -> None:
        take, held = it.ledger.take, {PARTITION_OF["u"]}

        async def takes(partitions: Sequence[int], owner: str) -> list[Cursor]:
            return await take([p for p in partitions if p not in held], owner)

        it.ledger.take = takes  # type: ignore[method-assign]
        await it.start()
        await it.writer.append(["a"], "t")
        assert await it.flushed("t")
        restore = went_back(it)
        for n in range(3):
            await it.writer.append([n], "t")
            await asyncio.sleep(1)
        await it.writer.append(["u"], "u")
        await asyncio.sleep(120)  # all of the first partition may be purged, and nothing is said of the other
        restore()
        held.clear()
        held.add(PARTITION_OF["t"])
        await asyncio.sleep(120)
        held.clear()
        assert await it.flushed("t", "u")
        assert await it.stored("t") == ["a", 0, 1, 2]

    log = LogConfig(partitions=4, failover_window_s=20.0)
    bench(main, log=log, retain_after_flush_s=20.0)


def test_why_nothing_can_be_purged_is_logged_once_and_again_after_it_went_on(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: while NATS was away, every flusher logged the same line every five seconds."""

    async def main(it: Bench) -> None:
        await it.start()
        fill = it.log.fill

        async def fails() -> tuple[int, int]:
            raise LogUnavailable("not connected")

        def lines() -> int:
            return len([r for r in caplog.records if getattr(r, "action", "") == "purge_failed"])

        for outages in 1, 2:
            it.log.fill = fails  # type: ignore[method-assign]
            await asyncio.sleep(60)
            assert lines() == outages
            it.log.fill = fill  # type: ignore[method-assign]
            await asyncio.sleep(60)

    bench(main)
