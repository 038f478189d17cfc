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
_LOST = {"log_gap", "log_group_removed"}


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
