"""A flusher that cannot renew its lease keeps its partitions until another flusher takes them."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from bufstore.buffer.flush.flusher import Flusher
from bufstore.errors import ConfigError, LogUnavailable
from bufstore.memory.shared_state import MemoryBucket, MemorySharedState
from unit.test_flusher import SUBJECTS, Bench, bench

PARTITION = SUBJECTS.partition("t")
EVERYTHING = {0, 1, 2, 3}
AWAY = "the hot bucket does not answer in time"


class Away(MemorySharedState):
    """A hot state that may be away."""

    #: The reason; empty: it can be reached.
    away = ""
    #: Why the list of members cannot be read, although records are written.
    unread = ""

    async def _turn(self) -> MemoryBucket:
        if self.away:
            raise LogUnavailable(self.away)
        return await super()._turn()

    async def members(self) -> dict[str, int]:
        if self.unread:
            raise ConfigError(self.unread)
        return await super().members()


class World(Bench):
    """Flushers of one log, each with a hot state of its own that can be cut off from the common bucket."""

    def __init__(self) -> None:
        super().__init__()
        self._bucket = MemoryBucket()
        self.flushers: dict[str, tuple[Flusher, Away]] = {}

    async def join(self, name: str) -> tuple[Flusher, Away]:
        shared = Away(self._bucket)
        made = Flusher(self.world.parts(shared, self.ledger), name, prepare=self.ledger.setup)
        self.flushers[name] = made, shared
        await made.start()
        return made, shared

    async def cut_off(self) -> tuple[Flusher, Away]:
        """A flusher that has all partitions, and was cut off from the bucket for longer than its lease."""
        made, shared = await self.join("a")
        await asyncio.sleep(2)
        assert set(made.cursors()) == EVERYTHING
        shared.away = AWAY
        await asyncio.sleep(30)
        assert set(made.cursors()) == EVERYTHING
        return made, shared

    async def aclose(self) -> None:
        for made, _ in self.flushers.values():
            await made.aclose()
        await super().aclose()


def world(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unit.test_flusher.Bench", World)
    bench(main)


def test_while_nobody_can_renew_his_lease_all_flush_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        made, shared = await it.cut_off()
        assert made.trouble == f"cannot renew its lease, and takes no new partitions until it can: {AWAY}"
        shared.away = ""
        await asyncio.sleep(2)
        assert not made.trouble
        shared.away = AWAY
        await asyncio.sleep(30)
        await it.writer.append([1])
        assert await it.flushed("t", within_s=5.0)

    world(main, monkeypatch)


def test_a_record_that_never_expires_keeps_no_partition_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was killed may have lost when a dead flusher's record expires."""

    async def main(at: World) -> None:
        await Away(at._bucket).renew_member("dead", 1 << 30)
        one, shared = await at.join("a")
        await asyncio.sleep(2)
        assert set(one.cursors()) < EVERYTHING, "it may be alive"
        await asyncio.sleep(3)
        assert set(one.cursors()) == EVERYTHING
        await asyncio.sleep(10)
        assert list(await shared.members()) == ["a"]

    world(main, monkeypatch)


def test_who_cannot_read_the_others_records_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        made, shared = await it.join("a")
        await asyncio.sleep(2)
        shared.unread = "NATS does not permit it"
        await asyncio.sleep(30)
        assert "NATS does not permit it" in made.trouble
        shared.unread = ""
        await asyncio.sleep(2)
        assert not made.trouble

    world(main, monkeypatch)


def test_why_a_lease_cannot_be_renewed_is_logged_once_and_again_when_it_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[str]:
        return [r.getMessage().rpartition(": ")[2] for r in caplog.records if r.message.startswith("cannot renew")]

    async def main(it: World) -> None:
        _, shared = await it.cut_off()
        assert logged() == [AWAY]
        shared.away = "the hot bucket refuses"
        await asyncio.sleep(30)
        assert logged()[1:] == ["the hot bucket refuses"]
        shared.away = ""
        await asyncio.sleep(2)
        shared.away = "the hot bucket refuses"
        await asyncio.sleep(30)
        assert logged()[2:] == ["the hot bucket refuses"], "it had been well in between"

    world(main, monkeypatch)


def test_what_is_lost_while_the_lease_cannot_be_renewed_is_taken_again_unless_others_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(it: World) -> None:
        made, _ = await it.cut_off()
        for n in (1, 2):
            it.log.feeds[PARTITION]._feed.lose("the consumer ended")
            await it.writer.append([n])
            assert await it.flushed("t", within_s=5.0)
        takeovers = made.state.takeovers
        assert takeovers == len(EVERYTHING) + 2
        it.ledger.locked.add("t")
        await it.writer.append(["waits in the ledger"])
        await asyncio.sleep(3)
        before = (await it.ledger.cursors())[PARTITION]
        it.ledger.locked.clear()
        assert await it.flushed("t", within_s=10.0)
        assert (await it.ledger.cursors())[PARTITION] == dataclasses.replace(before, term=before.term + 1)
        it.log.feeds[PARTITION]._feed.lose("the consumer ended")
        await it.writer.append(["new"])
        assert await it.flushed("t", within_s=5.0), "a commit of our own has raised the term since it was taken"
        takeovers += 1
        await it.ledger.take([PARTITION], "b")
        it.log.feeds[PARTITION]._feed.lose("the consumer ended")
        await it.writer.append([3])
        assert not await it.flushed("t", within_s=20.0), "it is somebody else's by now"
        assert set(made.cursors()) == EVERYTHING - {PARTITION}
        assert made.state.takeovers == takeovers

    world(main, monkeypatch)


def test_who_cannot_renew_his_lease_leaves_others_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        first, shared = await it.cut_off()
        second, _ = await it.join("b")
        await asyncio.sleep(30)
        assert set(second.cursors()) == EVERYTHING
        assert second.state.takeovers == len(EVERYTHING), "they do not take them from each other"
        for n in range(20):
            await it.writer.append([n])
            assert await it.flushed("t", within_s=5.0)
        assert await it.stored() == list(range(20))
        assert PARTITION not in first.cursors()
        assert second.state.takeovers == len(EVERYTHING)
        shared.away = ""
        await asyncio.sleep(10)
        assert set(first.cursors()) | set(second.cursors()) == EVERYTHING
        assert not set(first.cursors()) & set(second.cursors())

    world(main, monkeypatch)
