"""`bufstore tokens`, and the checks of `bufstore doctor` on its streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import token_instances
from bufstore.embedded import Servers
from bufstore.errors import TokenLost
from bufstore.tokens import ExclusiveWork, Locks
from command_line import Result, bufstore_cli
from token_instances import Open, took

name, opened = token_instances.name, token_instances.opened


async def run(servers: Servers, *arguments: object) -> Result:
    environment = {"BUFSTORE_NATS": servers.nats.url, "BUFSTORE_POSTGRES": servers.postgres.dsn}
    return await asyncio.to_thread(bufstore_cli, *arguments, **environment)


async def test_status_shows_what_there_is_to_do(opened: Open, servers: Servers, name: str) -> None:
    found = await run(servers, "tokens", "status", name)
    assert (found.code, "there are no tokens" in found.err) == (2, True)
    work = await opened()
    for key in ("a", "a", "b"):
        await work.submit(key)
    async with await took(work):
        found = await run(servers, "tokens", "status", name, "--json")
        assert found.code == 0
        assert found.json["work"]["stored"] == 3
        assert (found.json["work"]["untold"], found.json["locks_held"]) == (2, None)
        shown = (await run(servers, "tokens", "status", name)).out
        assert "not delivered yet: 2; delivered to workers: 1 (0 of them redelivered)" in shown
    async with await Locks.open(servers.nats.url, name=f"{name}-locks") as locks:
        await locks.acquire("a")
        found = await run(servers, "tokens", "who", f"{name}-locks", "a")
        assert (found.code, "of this kind" in found.err, "--lock" in found.err) == (2, True, True)
    async with await Locks.open(servers.nats.url, name=name) as locks:
        await locks.acquire("a", ttl_s=60)
        assert "locks held: 1" in (await run(servers, "tokens", "status", name)).out


async def test_who_holds_a_key_is_shown_and_it_is_taken_away(opened: Open, servers: Servers, name: str) -> None:
    config = (await opened())._config
    async with (
        await ExclusiveWork.open(servers.nats.url, config, holder="host 7") as work,
        await Locks.open(servers.nats.url, name=name) as locks,
    ):
        await work.submit("a")
        task, lock = await took(work), await locks.acquire("a", ttl_s=60, holder="host 8")
        for arguments, holder in (((), "host 7"), (("--lock",), "host 8")):
            found = await run(servers, "tokens", "who", name, "a", *arguments, "--json")
            assert (found.code, found.json["holder"]["name"]) == (0, holder)
            assert (await run(servers, "tokens", "release", name, "a", *arguments)).code == 2
            assert holder in (await run(servers, "tokens", "release", name, "a", "--force", *arguments)).out
            assert (await run(servers, "tokens", "who", name, "a", *arguments)).code == 1
        with pytest.raises(TokenLost):
            await task.extend()
        with pytest.raises(TokenLost):
            await lock.extend()
        async with await took(work) as task:
            await task.done()


async def test_the_doctor_looks_at_the_streams(opened: Open, servers: Servers, name: str) -> None:
    async def checks() -> dict[str, Any]:
        found = await run(servers, "doctor", "--json", "--tokens", name)
        return {c["what"]: c for c in found.json["checks"] if c["part"] == f"tokens {name}"}

    assert (await checks())["streams"]["level"] == "warning"
    work = await opened(ttl_s=1, max_bytes=10_000)
    found = await checks()
    assert {c["level"] for c in found.values()} == {"ok"}, found
    assert found.keys() == {"streams", "items copies", "fence copies", "items room", "items waiting"}
    for i in range(36):
        await work.submit(f"key {i}", b"x" * 200)
    await work._items.api(f"CONSUMER.DELETE.{name}-items.workers")
    found = await checks()
    assert (found["items room"]["level"], found["consumer"]["level"]) == ("warning", "bad")
