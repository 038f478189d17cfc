"""`notify.wakeups_per_item`, `notify.first_wake`: how many of a hundred idle workers wake per item, and how soon.

Each worker has its own connection. *ours* is NATS with counters; the others are the other adapters, and NATS without
hints, which behaves as a plain subject.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from bench.results import Benchmark
from bench.stage import Stage
from bufstore.embedded import EmbeddedError, RedisServer
from bufstore.notify import Hints, NatsNotifier, Notifier, PostgresNotifier, RedisNotifier

Open = Callable[[], Awaitable[Notifier]]

_WORKERS = 100
#: A hundred listening sessions and their pools exceed the connections of the embedded Postgres.
_WORKERS_POSTGRES = 40
_ITEMS = 10
_WAVES = 20


def notify(stage: Stage) -> Iterator[Benchmark]:
    """Measure waves of ten items; a wave ends when every worker was woken or spared."""
    workers, waves = stage.count(_WORKERS, 20), stage.count(_WAVES, 2)
    found: dict[str, list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        adapters = _adapters(stage, stack)
        for _ in range(stage.rounds):
            for name, open_ in adapters.items():
                count = min(workers, _WORKERS_POSTGRES) if "Postgres" in name else workers
                found.setdefault(name, []).append(asyncio.run(_measure(open_, count, waves)))
    found["1.1"] = [(1.1, 0.0)]
    for at, (what, unit) in enumerate((("wakeups_per_item", "wake-ups/item"), ("first_wake", "ms"))):
        values = {name: [pair[at] for pair in pairs] for name, pairs in found.items()}
        if at:
            values.pop("1.1")  # a target of wake-ups per item, meaningless for the time
        yield Benchmark(f"notify.{what}", unit, values.pop("ours"), values)


def _adapters(stage: Stage, stack: contextlib.ExitStack) -> dict[str, Open]:
    prefix = f"bench-{secrets.token_hex(4)}"

    def nats(hints: Hints) -> Open:
        return lambda: NatsNotifier.open(
            stage.servers.nats, prefix=f"{prefix}-{hints.value}", hints=hints, timeout_s=30
        )

    adapters: dict[str, Open] = {
        "ours": nats(Hints.COUNTERS),
        "NATS, KV": nats(Hints.KV),
        "NATS, no hints": nats(Hints.NONE),
        "Postgres, no hints": lambda: PostgresNotifier.open(stage.servers.dsn, prefix=prefix, timeout_s=30),
    }
    redis = RedisServer(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "redis")
    try:
        redis.start()
    except EmbeddedError as e:
        stage.say(f"without Redis: {e}")
        return adapters
    stack.callback(redis.stop)
    return {**adapters, "Redis": lambda: RedisNotifier.open(redis.url, timeout_s=30)}


async def _measure(open_: Open, workers: int, waves: int) -> tuple[float, float]:
    """Return the wake-ups per item, and the median time from notification to first wake-up, in ms."""
    async with contextlib.AsyncExitStack() as stack:
        notifiers = [await open_() for _ in range(workers)]
        woken: list[float] = []
        for notifier in notifiers:
            stack.push_async_callback(notifier.aclose)
            await notifier.listen_scheduled(["work"], lambda _: woken.append(time.perf_counter()))
        latencies, total = [], 0
        for wave in range(waves + 1):
            woken.clear()
            answered = _answered(notifiers)
            began = time.perf_counter()
            await notifiers[0].notify_scheduled("work", _ITEMS)
            async with asyncio.timeout(60):
                while _answered(notifiers) < answered + workers:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            if wave:  # the first wave makes streams and connections
                latencies.append((woken[0] - began) * 1000)
                total += len(woken)
        return total / (_ITEMS * waves), statistics.median(latencies)


def _answered(notifiers: list[Notifier]) -> int:
    """Return how many workers were woken or spared so far."""
    return sum(n.statistics().woken + n.statistics().spared for n in notifiers)
