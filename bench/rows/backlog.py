"""A backlog of a million entries in the log: built once per run, drained repeatedly into new schemas."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import nats

from bench.contestant import Place
from bench.ours import Ours
from bench.stage import Stage
from bench.stored import stored
from bufstore import PostgresThreadStore
from bufstore.threads.behind import buffer_of

#: What it creates stays until the end of the run: see `BenchServers.clear`.
NAME = "backlog"
_ENTRIES, _THREADS, _AT_ONCE = 1_000_000, 10_000, 512
#: How long NATS may take for an answer, in seconds; nats-py itself waits for half a second.
_ANSWER_S = 30.0


@dataclass(frozen=True)
class Backlog:
    """The backlog's place and size."""

    place: Place
    entries: int


def backlog(stage: Stage) -> Backlog:
    """Return this run's backlog, and build it at the first call."""
    found: Backlog | None = stage.shared.get(NAME)
    if found is None:
        place = stage.place(name=NAME)
        entries = stage.count(_ENTRIES, 2000)
        threads = max(entries * _THREADS // _ENTRIES, 1)
        stage.say(f"appending a backlog of {entries} entries")
        with stage.workers(place, writer=Ours) as workers:
            each, at_once = entries // threads, min(_AT_ONCE, threads)
            stored(
                place,
                "nats",
                lambda: workers["writer"].call("fill", threads=threads, each=each, at_once=at_once),
                done=lambda _: threads * each,
            )
        found = stage.shared[NAME] = Backlog(place, entries // threads * threads)
    return found


def fresh_options(stage: Stage) -> dict[str, str]:
    """Return options of `Ours` with a new schema and bucket, for which nothing of the backlog is flushed."""
    name = stage.place().name
    options = {"schema": name, "bucket": f"hot-{name}"}
    asyncio.run(_hand_over(Ours(backlog(stage).place, **options)))
    return options


async def _hand_over(ours: Ours) -> None:
    """Have the new schema name the log's target, and the log the new bucket; otherwise they would be refused."""
    log, place = ours.config.log, ours.place
    client = await nats.connect(place.nats)
    try:

        async def ask(verb: str, body: bytes = b"") -> dict[str, Any]:
            answer = await client.request(f"$JS.API.{verb}.{log.stream}", body, timeout=_ANSWER_S)
            return dict(json.loads(answer.data))

        found = (await ask("STREAM.INFO"))["config"]
        found["metadata"] |= {"bufstore.bucket": log.bucket}
        answer = await ask("STREAM.UPDATE", json.dumps(found).encode())
        assert "error" not in answer, answer
    finally:
        await client.close()
    store = PostgresThreadStore(place.dsn, schema=ours.schema, pool_size=1)
    async with buffer_of(store, place.nats, ours.config, name="bench").connected() as buffer:
        epoch, named = await buffer.log.epoch(), buffer.log.target
        assert epoch is not None and named is not None
        await buffer.ledger.setup()
        await buffer.ledger.claim(epoch, named)
