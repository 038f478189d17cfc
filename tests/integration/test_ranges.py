"""Reads of a range of the log go on and end, whatever happens to the range or the consumer meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.client import Client

from bufstore.config import as_nats_config
from bufstore.embedded import NatsServer
from bufstore.errors import LogFull
from bufstore.jetstream.direct_gets import Shown
from bufstore.jetstream.errors import MessageMissing
from bufstore.nats import ranges
from bufstore.nats.ranges import LogReader
from conftest import Deployment
from fault_proxy.proxy import FaultProxy
from helpers import fresh, run_of, said


@asynccontextmanager
async def written(deployment: Deployment, groups: int) -> AsyncIterator[tuple[LogReader, Client]]:
    """Make a log with this many groups; yield a reader of it and a client for disturbances."""
    deployment.verified = False
    thread = fresh()
    async with deployment.store(flusher=False) as store:
        for n in range(groups):
            await store.checkpoint_append(thread, [said(n)], run_of(thread))
    reader, client = (
        LogReader(as_nats_config(deployment.servers.nats.url), deployment.log.stream),
        await nats.connect(deployment.servers.nats.url),
    )
    await reader.open()
    try:
        yield reader, client
    finally:
        await client.close()
        await reader.aclose()


async def ask(client: Client, verb: str, body: object = None) -> dict[str, object]:
    request = json.dumps(body).encode() if body else b""
    answer = json.loads((await client.request(f"$JS.API.{verb}", request, timeout=10)).data)
    assert "error" not in answer, answer
    return answer


async def test_the_first_message_of_a_time_is_found_whatever_kinds_of_messages_there_are(
    deployment: Deployment,
) -> None:
    """Regression: what came before the log's first message of another kind (a part of a large entry) was left out.

    From a time on, a consumer with several filters goes on to the first message of a subject that has none before it.
    """
    thread = fresh()
    async with written(deployment, 4) as (reader, _):
        async with deployment.store(flusher=False) as store:
            await store.checkpoint_append(thread, [said("x" * 2_000_000)], run_of(thread))
            await store.checkpoint_append(thread, [said(1)], run_of(thread))
            await store.checkpoint_append(thread, [said(2)], run_of(thread))
        log = await reader.look()
        async with aclosing(reader.read(0, log.end, log.subjects.stored)) as parts:
            stored = [(read.message.seq, read.stored_at_ns) async for part in parts for read in part]
        assert [seq for seq, _ in stored] == list(range(log.first, log.end))
        for time_ns in [at_ns + late for _, at_ns in stored for late in (0, 1)]:
            wanted = next((seq for seq, at_ns in stored if at_ns >= time_ns), log.end)
            assert await reader.at_time(time_ns, log) == wanted


async def test_a_read_ends_when_the_rest_of_its_range_was_purged(deployment: Deployment) -> None:
    """Nobody writes to the log, so no message shows that the rest is gone."""
    async with written(deployment, 30) as (reader, client), asyncio.timeout(20):
        log = await reader.look()
        sequences = []
        async with aclosing(reader.read(log.first, log.end, log.subjects.stored, at_once=4)) as found:
            async for part in found:
                if not sequences:
                    await ask(client, f"STREAM.PURGE.{deployment.log.stream}", {"seq": log.end})
                sequences += [read.message.seq for read in part]
        assert sequences == list(range(log.first, log.first + len(sequences)))
        assert 4 <= len(sequences) < 30


@pytest.mark.parametrize("has", [0, 7])
async def test_a_node_that_has_not_caught_up_ends_no_read(
    deployment: Deployment, has: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: its consumer had nothing left, and an archive went on behind entries that it never had.

    A node that was cut off says so for seconds after it is back: here, the consumers of the first two tries.
    """
    async with written(deployment, 30) as (reader, _), asyncio.timeout(20):
        log, behind = await reader.look(), 2
        api, numbers_of = reader._stream.api, ranges.numbers_of

        async def lagging(verb: str, *arguments: Any, **more: Any) -> dict[str, Any]:
            nonlocal behind
            answer = await api(verb, *arguments, **more)
            if verb.startswith("CONSUMER.CREATE"):
                behind -= 1
                if behind >= 0 and not has:
                    answer["num_pending"] = 0
            return answer

        def pending(reply: str) -> Any:
            found = numbers_of(reply)
            if behind < 0 or not has or found[2] < has:
                return found
            if found[2] > has:
                raise ValueError("this node does not have it yet")
            return (*found[:-1], 0)

        monkeypatch.setattr(reader._stream, "api", lagging)
        monkeypatch.setattr(ranges, "numbers_of", pending)
        sequences = []
        async with aclosing(reader.read(log.first, log.end, log.subjects.stored)) as found:
            async for part in found:
                sequences += [read.message.seq for read in part]
        assert sequences[:30] == list(range(log.first, log.end))[:30]
        behind = 2
        assert await reader.at_time(0, log) == log.first
        behind = 2
        assert await reader.at_time(time.time_ns() + 10**9, log) == log.end, "nothing is as young as that"


async def test_a_leader_that_the_others_have_left_ends_no_read(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: just after it is back, it leads for itself, and says that there is nothing, as its consumers do.

    Here, in the first two tries; in the first one, it also answers what any copy may answer.
    """
    async with written(deployment, 30) as (reader, _), asyncio.timeout(20):
        log, tries = await reader.look(), 0
        stream = reader._stream
        api, leader_get, shown = stream.api, stream._leader_get, stream.shown

        async def of_an_old_leader(verb: str, *arguments: Any, **more: Any) -> dict[str, Any]:
            nonlocal tries
            tries += verb.startswith("CONSUMER.CREATE")
            if tries <= 2 and verb.startswith("STREAM.MSG.GET"):
                raise MessageMissing("no message found")
            answer = await api(verb, *arguments, **more)
            return answer | {"num_pending": 0} if tries <= 2 and "num_pending" in answer else answer

        async def got(*arguments: Any) -> Any:
            return None if tries <= 2 else await leader_get(*arguments)

        async def copied(*arguments: Any) -> Shown:
            return Shown([], 0, log.first) if tries <= 1 else await shown(*arguments)

        monkeypatch.setattr(stream, "api", of_an_old_leader)
        monkeypatch.setattr(stream, "_leader_get", got)
        monkeypatch.setattr(stream, "shown", copied)
        async with aclosing(reader.read(log.first, log.end, log.subjects.stored)) as found:
            assert [read.message.seq async for part in found for read in part] == list(range(log.first, log.end))
        tries = 0
        assert await reader.at_time(0, log) == log.first
        tries = 1
        assert await reader.at_time(time.time_ns() + 10**9, log) == log.end, "nothing is as young as that"


async def test_the_end_of_a_full_log_is_proved_in_the_place_of_older_proofs(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a vote was taken for a proof, and then any node was asked where the log ends."""
    async with written(deployment, 3) as (reader, _):
        log, publish = await reader.look(), reader._stream.publish
        ends = [await reader._proven_end(log.subjects) for _ in range(3)]
        assert ends == [log.end + 1, log.end + 2, log.end + 3]

        before = await reader.look()

        async def full(*arguments: Any) -> int:
            if (await reader.look()).bytes >= before.bytes:
                raise LogFull("no byte is left")
            return await publish(*arguments)

        monkeypatch.setattr(reader._stream, "publish", full)
        assert await reader._proven_end(log.subjects) == before.end + 1
        before, end = msgspec.structs.replace(before, bytes=0), (await reader.look()).end
        assert await reader._proven_end(log.subjects) == end, "not a byte is left: nothing is stored"


async def test_a_read_goes_on_after_its_consumer_has_gone(deployment: Deployment) -> None:
    """The server removes a consumer when its reader is slow for a minute."""
    async with written(deployment, 30) as (reader, client), asyncio.timeout(20):
        log, stream, gone = await reader.look(), deployment.log.stream, 0
        sequences = []
        async with aclosing(reader.read(log.first, log.end, log.subjects.stored, at_once=4)) as found:
            async for part in found:
                sequences += [read.message.seq for read in part]
                names = (await ask(client, f"CONSUMER.NAMES.{stream}"))["consumers"]
                assert isinstance(names, list)
                for name in names:
                    if name.startswith("range-") and gone < 3:
                        await ask(client, f"CONSUMER.DELETE.{stream}.{name}")
                        gone += 1
        assert gone == 3
        assert sequences == list(range(log.first, log.end))


@pytest.mark.long
async def test_a_read_goes_on_after_its_connection_was_replaced(deployment: Deployment) -> None:
    """The reader once waited for heartbeats of a consumer that did not know the new connection, and failed."""
    server = deployment.servers.nats
    async with written(deployment, 30) as (there, _), FaultProxy("127.0.0.1", server.port) as proxy:
        url = server.url.replace(f":{server.port}", f":{proxy.port}")
        reader = LogReader(as_nats_config(url), deployment.log.stream)
        await reader.open()
        try:
            log = await there.look()
            sequences = []
            async with (
                asyncio.timeout(30),
                aclosing(reader.read(log.first, log.end, log.subjects.stored, at_once=4)) as found,
            ):
                async for part in found:
                    if not sequences:
                        proxy.to_client.hold()  # the reader waits for messages in vain
                        asyncio.get_running_loop().call_later(0.5, heal, proxy)
                    sequences += [read.message.seq for read in part]
            assert sequences == list(range(log.first, log.end))
        finally:
            await reader.aclose()


@pytest.mark.long
async def test_a_reader_that_is_short_of_time_is_no_slow_consumer(tmp_path: Path) -> None:
    """The reader once requested too much of a range, and the server disconnected it for messages it had not taken."""
    server = NatsServer(tmp_path / "nats", sync_interval="2m", extra_config="max_pending: 20MB")
    server.start()
    reader, lost = LogReader(as_nats_config(server.url), "LOG"), list[bool]()
    reader._connection.on_lost(lambda: lost.append(True))
    try:
        client = await nats.connect(server.url)
        wanted = {"name": "LOG", "subjects": ["log.groups.0"], "metadata": {"bufstore.partitions": "1"}}
        await ask(client, "STREAM.CREATE.LOG", wanted)
        context = client.jetstream()
        for _ in range(240):
            await context.publish("log.groups.0", b"x" * (256 << 10))
        await client.close()
        await reader.open()
        sequences = []
        async with aclosing(reader.read(1, 241, ["log.groups.0"])) as found:
            async for part in found:
                time.sleep(0.02)  # noqa: ASYNC251 - other work of the process, which has one core for both
                sequences += [read.message.seq for read in part]
        assert sequences == list(range(1, 241))
        assert not lost
    finally:
        await reader.aclose()
        server.stop()


def heal(proxy: FaultProxy) -> None:
    proxy.cut()
    proxy.heal()


async def test_a_message_larger_than_a_read_asks_for_at_once_is_read(tmp_path: Path) -> None:
    """The server took larger messages when this one was stored."""
    server = NatsServer(tmp_path / "nats", sync_interval="2m", extra_config="max_payload: 16MB")
    server.start()
    reader = LogReader(as_nats_config(server.url), "LOG")
    try:
        client = await nats.connect(server.url)
        wanted = {"name": "LOG", "subjects": ["log.groups.0"], "metadata": {"bufstore.partitions": "1"}}
        await ask(client, "STREAM.CREATE.LOG", wanted)
        context = client.jetstream()
        sizes = [9, 9 << 20, 9 << 20, 9, 9]
        for size in sizes:
            await context.publish("log.groups.0", b"x" * size)
        await client.close()
        await asyncio.to_thread(server.stop)
        server.extra_config = ""
        await asyncio.to_thread(server.start)
        await reader.open()
        async with asyncio.timeout(20), aclosing(reader.read(1, 6, ["log.groups.0"])) as found:
            assert [read.size async for part in found for read in part] == sizes
    finally:
        await reader.aclose()
        server.stop()


async def test_no_more_is_asked_for_at_once_than_the_server_allows(tmp_path: Path) -> None:
    """A refusal was once taken for the end of a request, and the next request was refused too."""
    server = NatsServer(tmp_path / "nats")
    limits = "limits { max_request_batch: 8 }"
    server.extra_config = f'jetstream {{ store_dir: "{server.data}", {limits} }}'
    server.start()
    reader = LogReader(as_nats_config(server.url), "LOG")
    try:
        client = await nats.connect(server.url)
        wanted = {"name": "LOG", "subjects": ["log.groups.0"], "metadata": {"bufstore.partitions": "1"}}
        await ask(client, "STREAM.CREATE.LOG", wanted)
        for _ in range(50):
            await client.jetstream().publish("log.groups.0", b"x")
        await client.close()
        await reader.open()
        async with asyncio.timeout(20), aclosing(reader.read(1, 51, ["log.groups.0"])) as found:
            assert [read.message.seq async for part in found for read in part] == list(range(1, 51))
    finally:
        await reader.aclose()
        server.stop()
