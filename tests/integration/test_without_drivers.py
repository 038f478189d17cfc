"""Each package works without the drivers that it does not use; a name that needs one says what to install."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bufstore.embedded import Servers

PROGRAM = Path(__file__).parent.parent / "without_driver.py"
NO_POSTGRES = "psycopg,psycopg_pool,psycopg_binary,psycopg_c"
NO_NATS = "nats,nkeys"


async def _run(part: str, refused: str, *arguments: str) -> str:
    """Run the program, which must succeed, and return its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, PROGRAM, part, refused, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    printed, errors = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, errors.decode()
    return printed.decode()


@pytest.mark.parametrize("part", ["tokens", "mailbox", "notify_nats"])
@pytest.mark.parametrize("refused", [f"{NO_POSTGRES},redis", "psycopg-without-libpq"])
async def test_what_needs_nats_only_works_without_postgres(servers: Servers, part: str, refused: str) -> None:
    await _run(part, refused, servers.nats.url)


async def test_notifications_over_redis_need_no_other_driver(redis_server: Any) -> None:
    await _run("notify_redis", f"{NO_POSTGRES},{NO_NATS}", redis_server.url)


async def test_notifications_in_memory_need_no_driver() -> None:
    await _run("notify_memory", f"{NO_POSTGRES},{NO_NATS},redis")


@pytest.mark.parametrize("part", ["postgres_store", "postgres_mailbox"])
async def test_what_needs_postgres_only_works_without_nats(servers: Servers, part: str) -> None:
    await _run(part, f"{NO_NATS},redis", servers.postgres.dsn)


async def test_a_name_whose_driver_is_missing_says_what_to_install() -> None:
    asked = ["bufstore.BufferedThreadStore", "bufstore.PostgresThreadStore", "bufstore.mailbox.PostgresMailboxStore"]
    for refused in (NO_POSTGRES, "psycopg-without-libpq"):
        said = await _run("ask_for", refused, *asked)
        for name in asked:
            assert f"{name} needs psycopg: pip install 'psycopg[binary,pool]'" in said
    asked = ["bufstore.BufferedThreadStore", "bufstore.tokens.Locks", "bufstore.notify.NatsNotifier"]
    said = await _run("ask_for", NO_NATS, *asked)
    for name in asked:
        assert f"{name} needs nats: pip install nats-py" in said
    said = await _run("ask_for", "redis", "bufstore.notify.RedisNotifier")
    assert "bufstore.notify.RedisNotifier needs redis: pip install 'bufstore[redis]'" in said
    said = await _run("ask_for", "langgraph,langchain_core", "bufstore.langgraph.AsyncBufferedSaver")
    assert "bufstore.langgraph.AsyncBufferedSaver needs langchain_core: pip install 'bufstore[langgraph]'" in said
    said = await _run("ask_for", "pyarrow", "bufstore.spark.tabulate")
    assert "bufstore.spark.tabulate needs pyarrow: pip install 'bufstore[spark]'" in said
    said = await _run("spark_session", "pyspark")
    assert "bufstore.spark.session needs pyspark: pip install 'bufstore[spark]'" in said
