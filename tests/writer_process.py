"""A writer in a process of its own, for tests that kill it: appends numbers to shared threads until it is stopped.

Prints one JSON line per acknowledged append, so that the acknowledgements outlive the process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from bufstore import BufferConfig, BufferedThreadStore, LogConfig, PostgresThreadStore, Run
from bufstore.errors import OutcomeUnknown, Unavailable


async def main(options: dict[str, Any]) -> None:
    config = BufferConfig(log=LogConfig(**options["log"]), flush_interval_s=0.05, lease_s=4)
    inner = PostgresThreadStore(options["postgres"], schema=options["schema"], pool_size=4)
    async with await BufferedThreadStore.open(inner, nats=options["nats"], config=config) as store:
        print(json.dumps({"ready": True}), flush=True)
        await asyncio.gather(*(write(store, t, options["name"]) for t in options["threads"]))


async def write(store: BufferedThreadStore, thread_id: str, name: str) -> None:
    for n in range(10**9):
        key = f"{name}-{n}"
        while True:
            try:
                run = Run(run_id=f"{name}-of-{thread_id}", thread_id=thread_id)
                receipt = await store.checkpoint_append(thread_id, [key], run, idempotency_key=key)
            except (OutcomeUnknown, Unavailable):  # Unavailable also comes from a busy machine
                continue
            break
        print(json.dumps([thread_id, key, receipt.thread_seq]), flush=True)
        if n % 10 == 3:
            seen = await store.load_messages(thread_id, at_least=receipt)
            assert seen is not None
            assert key in seen
        if n % 25 == 7:
            await store.force_flush(thread_id)


asyncio.run(main(json.loads(sys.argv[1])))
