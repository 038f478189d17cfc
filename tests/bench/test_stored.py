"""A row of the benchmarks notices a store that acknowledges and keeps nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nats
import pytest

from bufstore.embedded import Servers
from helpers import fresh

_ROOT = Path(__file__).parent.parent.parent


class Liar:
    """In place of a worker: it says of everything that it was done."""

    killed = True

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def begin(self, method: str, **_: Any) -> None:
        pass

    def end(self, timeout_s: float = 0.0) -> Any:
        return [0.001] * 1000, 1.0, 0.1

    def call(self, method: str, **_: Any) -> Any:
        return {"done": 1000} if method in {"load", "append_each"} else 1.0


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, servers: Servers) -> Any:
    monkeypatch.syspath_prepend(str(_ROOT))
    from bench import stage

    monkeypatch.setattr(stage, "Worker", Liar)
    pids = {"nats": [servers.nats.pid], "postgres": [servers.postgres.pid]}
    urls = {"nats": servers.nats.url, "lazy_nats": servers.nats.url, "dsn": servers.postgres.dsn}
    return stage.Stage(SimpleNamespace(**urls, pids=lambda lazy: pids), 1, 0.002)


@pytest.mark.parametrize(
    "row",
    [
        "append",
        "append_lazy",
        "append_lanes",
        "append_8x8",
        "append_idle",
        "drain",
        "langgraph_steps",
        "langgraph_react",
        "langgraph_burst",
        "spark_sink",
    ],
)
def test_what_was_acknowledged_and_not_stored_is_no_figure(stage: Any, row: str) -> None:
    from bench.rows.table import ROWS
    from bench.stored import NotStored

    with pytest.raises(NotStored, match=r"messages of \d+ bytes were acknowledged, and (nats|postgres) got \d+ bytes"):
        list(ROWS[row](stage))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_message_that_is_not_there_is_missed(stage: Any, servers: Servers, missing: int) -> None:
    from bench.stored import NotStored, stored

    async def publish() -> None:
        client = await nats.connect(servers.nats.url)
        name = fresh()
        await client.jetstream().add_stream(name=name, subjects=[name])
        for _ in range(9):
            await client.jetstream().publish(name, b"x" * 2048)
        await client.close()

    def load() -> int:
        asyncio.run(publish())
        return 9 + missing

    if missing:
        with pytest.raises(NotStored, match="10 messages"):
            stored(stage.place(), "nats", load, float)
    else:
        assert stored(stage.place(), "nats", load, float) == 9
