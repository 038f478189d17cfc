"""`python bench/notify.py`: how many workers wake per item, and how soon, with a hundred idle ones.

Each worker has a connection of its own and waits as `wait_for_work` does: called, it is busy, takes one item if there
is one, and goes idle again. Embedded servers, everything on one machine. Prints a table and writes
`results/notify.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bufstore.embedded import RedisServer, Servers
from bufstore.notify import MemoryBroker, MemoryNotifier, Notifier
from bufstore.notify.nats import Hints, NatsNotifier
from bufstore.notify.postgres import PostgresNotifier
from bufstore.notify.redis import RedisNotifier

Open = Callable[[], Awaitable[Notifier]]


async def measure(open_: Open, workers: int, items: int, waves: int) -> tuple[float, float]:
    """Wake-ups per item, and the median milliseconds from telling to the first wake-up."""
    async with contextlib.AsyncExitStack() as stack:
        notifiers = [await open_() for _ in range(workers)]
        for notifier in notifiers:
            stack.push_async_callback(notifier.aclose)
        teller = notifiers[0]
        woken: list[float] = []
        for notifier in notifiers:
            await notifier.listen_scheduled(["work"], lambda _: woken.append(time.perf_counter()))
        latencies, total = [], 0
        for wave in range(waves + 1):
            woken.clear()
            answered = _answered(notifiers)
            began = time.perf_counter()
            await teller.notify_scheduled("work", items)
            async with asyncio.timeout(60):
                while _answered(notifiers) < answered + workers:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            if wave:  # the first makes streams and connections
                latencies.append((woken[0] - began) * 1000)
                total += len(woken)
        return total / (items * waves), statistics.median(latencies)


def _answered(notifiers: list[Notifier]) -> int:
    """How many have been called or spared so far."""
    return sum(n.statistics().woken + n.statistics().spared for n in notifiers)


async def main(workers: int, items: int, waves: int) -> None:
    """Measure every adapter."""
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(Servers())
        redis = RedisServer(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        redis.start()
        stack.callback(redis.stop)
        broker = MemoryBroker()

        async def memory() -> Notifier:
            return MemoryNotifier(broker)

        def nats(hints: Hints) -> Open:
            return lambda: NatsNotifier.open(servers.nats.url, prefix=f"b-{hints.value}", hints=hints, timeout_s=30)

        adapters: dict[str, Open] = {
            "memory": memory,
            "NATS, counters": nats(Hints.COUNTERS),
            "NATS, KV": nats(Hints.KV),
            "NATS, no hints": nats(Hints.NONE),
            "Redis": lambda: RedisNotifier.open(redis.url, timeout_s=30),
            "Postgres, no hints": lambda: PostgresNotifier.open(servers.postgres.dsn, timeout_s=30),
        }
        rows = []
        for name, open_ in adapters.items():
            # A hundred listening sessions and their pools are more than the embedded Postgres takes.
            count = min(workers, 40) if name.startswith("Postgres") else workers
            per_item, latency = await measure(open_, count, items, waves)
            rows.append({"name": name, "workers": count, "wakeups_per_item": per_item, "first_wake_ms_p50": latency})
            print(f"{name:20} {count:4} workers {per_item:7.2f} wake-ups per item, first after {latency:6.2f} ms (p50)")
    out = Path(__file__).parent / "results" / "notify.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"items": items, "waves": waves, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--items", type=int, default=10, help="scheduled at once, in each wave")
    parser.add_argument("--waves", type=int, default=20)
    options = parser.parse_args()
    asyncio.run(main(options.workers, options.items, options.waves))
