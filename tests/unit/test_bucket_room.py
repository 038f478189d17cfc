"""How a bucket with a `max_bytes` keeps room: for flushers in the shared state, for what is there in a mailbox."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from bufstore.errors import LogUnavailable
from bufstore.jetstream.messages import Outgoing
from bufstore.mailbox.nats_bucket import _Room as MailboxRoom
from bufstore.nats.shared_state import _Room
from unit.fake_log import run

LIMIT, RUN = 1 << 20, 200


class Bucket:
    """The size and the limit of a bucket on a server."""

    def __init__(self, max_bytes: int = LIMIT) -> None:
        self.config: dict[str, Any] = {"max_bytes": max_bytes}
        self.held = self.asked = 0
        self.away = False

    async def info(self, timeout_s: float) -> Any:
        self.asked += 1
        await asyncio.sleep(0.001)
        if self.away:
            raise LogUnavailable("no answer")
        return {"config": self.config, "state": {"bytes": self.held}}

    async def claim(self, room: _Room) -> bool:
        """Register a run. Returns whether there was room."""
        if taken := await room.takes(RUN):
            self.held += RUN
        return taken


@pytest.mark.parametrize("writers", [1, 8, 64])
def test_however_many_write_at_once_there_is_room_left(writers: int) -> None:
    async def main() -> None:
        bucket, chance = Bucket(), random.Random(writers)
        rooms = [_Room(bucket) for _ in range(writers)]  # type: ignore[arg-type]
        taken = [await bucket.claim(chance.choice(rooms)) for _ in range(2 * LIMIT // RUN)]
        assert not any(taken[-200:])
        assert LIMIT * 13 // 16 < bucket.held < LIMIT * 15 // 16
        assert bucket.asked < 700 * writers

    run(main())


def test_a_limit_counts_that_is_set_or_raised_while_a_process_runs() -> None:
    async def main() -> None:
        bucket = Bucket(-1)
        bucket.held, room = LIMIT, _Room(bucket)  # type: ignore[arg-type]
        assert await bucket.claim(room)
        bucket.config["max_bytes"] = LIMIT
        await asyncio.sleep(6)
        assert not await bucket.claim(room)
        bucket.config["max_bytes"] = 2 * LIMIT
        await asyncio.sleep(6)
        assert await bucket.claim(room)
        del bucket.config["max_bytes"]
        await asyncio.sleep(6)
        assert await bucket.claim(room)

    run(main())


def test_a_bucket_that_does_not_say_how_full_it_is_is_asked_every_few_seconds() -> None:
    async def main() -> None:
        bucket = Bucket()
        bucket.away, room = True, _Room(bucket)  # type: ignore[arg-type]
        assert all([await bucket.claim(room) for _ in range(100)])
        assert bucket.asked == 1

    run(main())


@pytest.mark.parametrize("replicated", [True, False])
def test_a_mailbox_goes_by_no_room_that_an_old_leader_tells_of(replicated: bool) -> None:
    """Regression: such a node told of a full bucket when it had been purged, or of an empty one that had filled."""
    told: list[str] = []

    async def prove(unused: str, timeout_s: float) -> None:
        told.append(unused)

    async def info() -> Any:
        told.append("look")
        return {"state": {"bytes": 0 if "unused" in told or not replicated else LIMIT, "messages": 0}}

    async def main() -> None:
        stream: Any = SimpleNamespace(replicated=replicated, prove=prove, info=info)
        room = MailboxRoom(LIMIT, stream, "unused", 1.0)
        async with room.taken([Outgoing("s", b"x")]):
            pass
        assert told == (["unused", "look"] if replicated else ["look"])

    run(main())
