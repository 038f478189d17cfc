"""`python bench/tokens.py`: exclusive work per second on distinct keys and on one hot key, and locks per second.

Embedded nats-server that syncs its disk before every acknowledgement; submitters and workers in this process. Prints
a table and writes `results/tokens.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from bufstore.embedded import NatsServer
from bufstore.tokens import ExclusiveWork, Form, Locks, Task, TokensConfig


async def timed(work: ExclusiveWork, items: int, concurrency: int) -> float:
    """Seconds that it takes to work off so many items, of which nothing is to be done."""
    stopping, left = asyncio.Event(), items

    async def handler(task: Task) -> None:
        nonlocal left
        left -= 1
        if not left:
            stopping.set()

    began = time.perf_counter()
    async with asyncio.timeout(300):
        await work.run(handler, stopping, concurrency=concurrency)
    return time.perf_counter() - began


async def main(url: str, keys: int, concurrency: int) -> None:
    """Measure both forms, and the lock."""
    rows: list[dict[str, object]] = []

    def note(name: str, value: float, unit: str) -> None:
        rows.append({"name": name, "value": value, "unit": unit})
        print(f"{name:48} {value:10.2f} {unit}")

    for form in Form:
        config = TokensConfig(name=f"bench-{form.value}", form=form)
        async with await ExclusiveWork.open(url, config) as work:
            for i in range(12):
                await work.submit("hot", str(i).encode())
            note(f"{form.value}: 12 items of one key", await timed(work, 12, 4), "s")
            began = time.perf_counter()
            for i in range(0, keys, concurrency):
                await asyncio.gather(*(work.submit(f"key {n}") for n in range(i, min(i + concurrency, keys))))
            note(f"{form.value}: submitted, distinct keys", keys / (time.perf_counter() - began), "/s")
            note(f"{form.value}: worked on, distinct keys", keys / await timed(work, keys, concurrency), "/s")
    async with await Locks.open(url) as locks:
        began = time.perf_counter()
        for _ in range(500):
            await (await locks.acquire("one")).release()
        note("lock: acquired and released, one after another", 500 / (time.perf_counter() - began), "/s")
    out = Path(__file__).parent / "results" / "tokens.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"keys": keys, "concurrency": concurrency, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder) / "nats")
        server.start()
        try:
            asyncio.run(main(server.url, options.keys, options.concurrency))
        finally:
            server.stop()
