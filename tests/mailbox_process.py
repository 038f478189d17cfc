"""A mailbox worker in a process of its own, for tests that kill it: works on shared threads until it is stopped.

Prints one JSON line for each claim and for each acknowledged end.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

from bufstore.errors import BufstoreError, StaleClaim
from bufstore.mailbox import MailboxConfig, NatsMailboxNames, NatsMailboxStore, PostgresMailboxStore, Sweeper


async def main(options: dict[str, Any]) -> None:
    config = MailboxConfig(lease_s=1.0, sweep_interval_s=1.0, timeout_s=10.0)
    store: NatsMailboxStore | PostgresMailboxStore
    if "bucket" in options:
        names = NatsMailboxNames(bucket=options["bucket"], max_bytes=256 << 20)
        store = NatsMailboxStore(options["nats"], names=names, config=config)
    else:
        store = PostgresMailboxStore(options["postgres"], schema=options["schema"], pool_size=4, config=config)
    # This worker's clock is wrong by `skew_ms`.
    real = store.backend.now_ms
    store.backend.now_ms = lambda: real() + options.get("skew_ms", 0)  # type: ignore[method-assign]
    async with store, Sweeper(store):
        print(json.dumps(["ready"]), flush=True)
        await asyncio.gather(*(work(store, options["name"], t) for t in options["threads"]))


async def work(store: Any, name: str, thread_id: str) -> None:
    while True:
        try:
            claim = await store.claim(thread_id, name)
            if claim is None:
                await asyncio.sleep(0.01)
                continue
            print(json.dumps(["claim", thread_id, claim.dispatch_id, claim.token, name]), flush=True)
            # Sometimes longer than the lease: another worker has the claim by then.
            await asyncio.sleep(1.5 if random.random() < 0.02 else random.uniform(0, 0.01))
            ended = await store.ack(claim)
            print(json.dumps(["ack", thread_id, claim.dispatch_id, claim.token, ended.status.value]), flush=True)
        except StaleClaim:
            print(json.dumps(["stale", thread_id, claim.dispatch_id, claim.token, name]), flush=True)
        except BufstoreError:
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
