"""A storm of poison among good entries, while agents write: all poison is parked, and no good entry waits long.

`make test` runs a short one; ``make storm`` runs 10 000 bad entries among 100 000 (some minutes).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

import msgspec
import psutil

from bufstore import Consistency
from bufstore.buffer.entry import Base
from bufstore.threads.payload import Payload, encode_payload
from conftest import Deployment
from helpers import fresh, query, run_of, said
from hostile import RUN, forged, publish_entry, saved, sealed

BAD = int(os.environ.get("BUFSTORE_STORM") or 300)
SEED = int(os.environ.get("BUFSTORE_SEED") or 11)
FOUND_LATE = b"\x81\xa2id"
_AT_ONCE = 100
_LATE_S = 10.0


def poison(chance: random.Random) -> tuple[bytes | None, bytes]:
    """Return headers and body of an entry that cannot be applied, for a random reason."""
    payload = {
        0: chance.randbytes(chance.randrange(200)),
        1: b"\x95\xaacheckpoint\x00" + b"\x91" * 10_000,
        2: msgspec.msgpack.encode(["a kind of the future", 0, []]),
        3: encode_payload(Payload(9, [], RUN, saved("run"))),
        4: encode_payload(Payload(0, [FOUND_LATE], RUN, saved("run"))),  # fails when it is applied
        5: encode_payload(Payload(0, [b"\x01"], RUN, saved("a\0b"))),  # fails in Postgres
    }[chance.randrange(6)]
    match chance.randrange(4):
        case 0:
            return None, payload
        case 1:
            return sealed([7, 0, Base.UNKNOWN, 0, 1, True, b"", 0, 1, True], payload, version=2), payload
        case _:
            return forged(payload, chance=chance), payload


async def test_a_storm_of_poison_among_good_entries(deploy: Any) -> None:
    good, bad = 10 * BAD, BAD
    deployment: Deployment = deploy(max_bytes=1 << 30)
    deployment.verified = False  # forged entries name no predecessor, which verify rightly reports
    chance = random.Random(SEED)
    threads = [fresh() for _ in range(good // 10)]
    victims = chance.sample(threads, len(threads) // 4)
    late: list[float] = []
    certain: list[bool] = []
    room = asyncio.Semaphore(_AT_ONCE)
    before = psutil.Process().memory_info().rss
    began = time.monotonic()
    async with deployment.store(quarantine_max=2 * bad) as store:

        async def talk(thread_id: str) -> None:
            async with room:
                for n in range(10):
                    await store.checkpoint(thread_id, [said(i) for i in range(n + 1)], run_of(thread_id))
            if thread_id not in victims and chance.random() < 0.05:
                asked = time.monotonic()
                await store.force_flush(thread_id, timeout_s=60)
                late.append(time.monotonic() - asked)

        async def attack() -> None:
            head, body = poison(chance)
            # Poison that fails only when applied may be replaced before by a whole list in the same window.
            certain.append(FOUND_LATE not in body)
            async with room:
                await publish_entry(store, chance.choice(victims), head, body)

        work = [talk(t) for t in threads] + [attack() for _ in range(bad)]
        chance.shuffle(work)
        await asyncio.gather(*work)
        await store.force_flush_all(timeout_s=300)
        seconds = time.monotonic() - began
        print(f"seed {SEED}: {seconds:.1f} s, a good thread waited {max(late):.2f} s at most")
        assert max(late) < _LATE_S, f"seed {SEED}"
        # A victim's own entries behind poison are parked with it, until a whole list heals the thread.
        assert await store.quarantined() >= sum(certain) >= bad // 2, f"seed {SEED}"
        for thread_id in chance.sample(threads, min(len(threads), 1000)):
            if thread_id not in victims:
                found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
                assert found == [said(i) for i in range(10)], f"seed {SEED}"
        await asyncio.gather(*(store.checkpoint(t, [said(0)], run_of(t)) for t in victims[:50]))
        for thread_id in victims[:50]:
            assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == [said(0)], f"seed {SEED}"
        broken = f"SELECT count(*) FROM {deployment.name}.buffer_threads WHERE broken_since IS NOT NULL"
        assert (await query(deployment.servers.postgres.dsn, broken))[0][0] <= len(victims)
        assert psutil.Process().memory_info().rss - before < 1 << 30
