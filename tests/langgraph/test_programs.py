"""The example program, killed and resumed while Postgres is away; and the saver as LangGraph's server opens it."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

from bufstore import ConfigError
from bufstore.embedded import Servers
from bufstore.langgraph import AsyncBufferedSaver
from helpers import fresh
from langgraph_savers import Place, checkpoint, config

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "langgraph_agent.py"


async def _start(servers: Servers, thread_id: str, what: str, tool_s: float = 0) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        EXAMPLE,
        servers.postgres.dsn,
        servers.nats.url,
        thread_id,
        what,
        env={**os.environ, "TOOL_SECONDS": str(tool_s)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def _run(servers: Servers, thread_id: str, what: str) -> list[str]:
    process = await _start(servers, thread_id, what)
    printed, errors = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode == 0, errors.decode()
    return printed.decode().splitlines()


@pytest.mark.long  # half a minute
async def test_the_example_is_killed_and_goes_on_while_postgres_is_away(own_servers: Servers) -> None:
    thread_id = fresh()
    killed = await _start(own_servers, thread_id, "ask", tool_s=600)
    assert killed.stdout is not None
    try:
        assert await asyncio.wait_for(killed.stdout.readline(), 60) == "looking up …\n".encode()
    finally:
        killed.kill()
        await killed.communicate()
    own_servers.postgres.stop()
    went_on = await _run(own_servers, thread_id, "go-on")
    assert went_on[-2:] == [
        "ai: Your bag was left in Zürich. I can have it sent.",
        "question: Send the bag for 40 francs?",
    ]
    own_servers.postgres.start()
    assert (await _run(own_servers, thread_id, "yes"))[-2:] == ["ai: That is 40 francs.", "human: yes"]
    async with AsyncBufferedSaver.from_conn_string(own_servers.postgres.dsn, own_servers.nats.url) as saver:
        await saver.force_flush()  # the process may have had too little time for it
    async with AsyncPostgresSaver.from_conn_string(own_servers.postgres.dsn) as plain:
        found = await plain.aget_tuple(config(thread_id))
        assert found is not None
        assert [m.content for m in found.checkpoint["channel_values"]["messages"]][-2:] == ["That is 40 francs.", "yes"]


async def test_langgraphs_server_finds_the_saver_by_its_path(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = "bufstore.langgraph.server:checkpointer".partition(":")
    opened = getattr(import_module(module), name)
    monkeypatch.delenv("BUFSTORE_POSTGRES", raising=False)
    with pytest.raises(ConfigError, match="BUFSTORE_POSTGRES"):
        async with opened():
            pass
    place = Place(servers)
    for variable, value in {
        "POSTGRES": place.dsn,
        "NATS": place.nats,
        "LANGGRAPH_SCHEMA": place.schema,
        "LANGGRAPH_BUFFER_SCHEMA": f"{place.schema}_b",
        "LANGGRAPH_STREAM": place.log.stream,
        "LANGGRAPH_BUCKET": place.log.bucket,
        "LANGGRAPH_SUBJECT": place.log.subject,
        "LANGGRAPH_LANES": "two",
    }.items():
        monkeypatch.setenv(f"BUFSTORE_{variable}", value)
    with pytest.raises(ConfigError, match="BUFSTORE_LANGGRAPH_LANES must be a number, not 'two'"):
        async with opened():
            pass
    monkeypatch.setenv("BUFSTORE_LANGGRAPH_LANES", "2")
    async with opened() as saver:
        assert isinstance(saver, AsyncBufferedSaver)
        assert len(saver.engine.all) == 2
        await saver.aput(config("t"), checkpoint({}, {}), {"source": "loop", "step": 1, "parents": {}}, {})
    async with place.plain() as plain:
        assert await plain.aget_tuple(config("t")) is not None
