"""The log's files are damaged or truncated while NATS is down: it is noticed, and nothing wrong is stored."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bufstore import (
    BufferedThreadStore,
    BufstoreError,
    Consistency,
    LogRolledBack,
    LogUnavailable,
    ReadNotFresh,
    ThreadQuarantined,
)
from bufstore.embedded import Servers
from conftest import Deployment
from helpers import eventually, run_of
from thorough import seldom

_THREADS = [f"t{n}" for n in range(6)]
_LENGTH = 30
#: The actions of the errors that a process logs when it finds that groups are gone that it has seen.
_LOST = {"log_gap", "log_refused"}


def flip(block: Path, chance: random.Random) -> None:
    data = bytearray(block.read_bytes())
    at = chance.randrange(len(data) // 4, 3 * len(data) // 4)
    data[at] ^= 1 << chance.randrange(8)
    block.write_bytes(data)


def cut(block: Path, chance: random.Random) -> None:
    data = block.read_bytes()
    block.write_bytes(data[: chance.randrange(len(data) // 2, len(data))])


@pytest.mark.parametrize("damage", [flip, *seldom(cut)], ids=["flip", "cut"])
@pytest.mark.parametrize("seed", [0, *seldom(1, 2)])
async def test_damage_to_the_logs_files_never_shows_as_a_wrong_state(
    own_servers: Servers, damage: Any, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Unflushed entries may be lost with their file. Then it is reported, and a beginning of each thread is left."""
    deployment = Deployment(own_servers)
    deployment.verified = False
    async with deployment.store(flusher=False) as writer:
        for n in range(_LENGTH):
            for thread_id in _THREADS:
                await writer.checkpoint_append(thread_id, [n], run_of(thread_id))
        own_servers.nats.stop()
        stream = own_servers.nats.data / "jetstream" / "$G" / "streams" / deployment.log.stream
        (block,) = sorted(stream.glob("msgs/*.blk"))
        damage(block, random.Random(seed))
        own_servers.nats.start()
        await eventually(lambda: connected(writer))
        said = await noticed(writer)
        async with deployment.store(flush_timeout_s=20, read_timeout_s=10) as store:
            wrong = [t for t in _THREADS if await flushed(store, t) != list(range(_LENGTH))]
            for thread_id in wrong:
                known = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) or []
                assert known == list(range(len(known))), "no beginning of what was written"
            parked = {p.thread_id for p in await store.quarantine.page()}
        reported = said not in ("", "all is there")
        if not reported:  # the log's end is missing: who has seen it finds out when it writes
            with suppress(BufstoreError):
                await writer.checkpoint_append(_THREADS[0], ["more"], run_of(_THREADS[0]))
            reported = bool(_LOST & {getattr(record, "action", "") for record in caplog.records})
    # Any missing entry was reported by the process that wrote it, or is parked.
    assert set(wrong) <= parked or reported
    assert wrong or not reported
    assert parked <= set(wrong)


@pytest.mark.parametrize("behind", [False, True])
async def test_a_server_that_lost_the_end_of_its_file_gets_no_writes_from_who_has_seen_it(
    own_servers: Servers, behind: bool
) -> None:
    """nats-server goes on behind what is missing. `behind`: a new process has already gone on there."""
    deployment = Deployment(own_servers)
    deployment.verified = False
    async with deployment.store(flusher=False) as writer, deployment.store(flusher=False) as reader:
        for n in range(_LENGTH):
            for thread_id in _THREADS:
                await writer.checkpoint_append(thread_id, [n], run_of(thread_id))
        before = [await reader.load_messages(thread_id) for thread_id in _THREADS]
        assert before == [list(range(_LENGTH))] * len(_THREADS)
        own_servers.nats.stop()
        stream = own_servers.nats.data / "jetstream" / "$G" / "streams" / deployment.log.stream
        (block,) = sorted(stream.glob("msgs/*.blk"))
        block.write_bytes(block.read_bytes()[: -block.stat().st_size // 4])
        own_servers.nats.start()
        if behind:
            async with deployment.store(flush_timeout_s=20) as faster:
                left = await faster.load_messages(_THREADS[0])
                assert left is not None
                assert left == list(range(len(left)))
                assert len(left) < _LENGTH
                await faster.checkpoint_append(_THREADS[0], ["since"], run_of(_THREADS[0]))
                await faster.force_flush_all()
        await eventually(lambda: connected(writer))
        for thread_id in _THREADS:
            with pytest.raises(LogRolledBack, match="lost its end"):
                await writer.checkpoint_append(thread_id, ["more"], run_of(thread_id))
        assert "lost its end" in (await writer.health()).log
        if not behind:  # it still shows what it knows
            assert [await writer.load_messages(thread_id) for thread_id in _THREADS] == before
        # Who has written nothing of it says so once, and goes on with what is left.
        with pytest.raises(LogRolledBack, match="lost its end"):
            await reader.checkpoint_append(_THREADS[1], ["more"], run_of(_THREADS[1]))
        await eventually(lambda: accepted(reader))
        await reader.checkpoint_append(_THREADS[1], ["more"], run_of(_THREADS[1]))
        found: Any = await reader.load_messages(_THREADS[1])
        assert found[-1] == "more"
        assert found[:-1] == list(range(len(found) - 1))


async def accepted(store: BufferedThreadStore) -> bool:
    return not (await store.health()).log


async def connected(store: BufferedThreadStore) -> bool:
    try:
        await store.statistics()
    except LogRolledBack:
        return True
    except LogUnavailable:
        return False
    return True


async def noticed(store: BufferedThreadStore) -> str:
    """Return the error that the process which wrote the entries gets, or "all is there" if it reads all of them."""
    try:
        for thread_id in _THREADS:
            if await store.load_messages(thread_id) != list(range(_LENGTH)):
                return ""
    except (LogRolledBack, ThreadQuarantined, ReadNotFresh) as e:
        return str(e)
    return "all is there"


async def flushed(store: BufferedThreadStore, thread_id: str) -> list[Any] | None:
    try:
        await store.force_flush(thread_id)
        return await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
    except BufstoreError:
        return None
