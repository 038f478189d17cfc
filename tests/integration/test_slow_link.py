"""Writes on a slow link, and an entry that takes long to pass it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest

from bufstore import LogUnavailable, OutcomeUnknown
from bufstore.config import NatsConfig
from bufstore.embedded import Servers
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.messages import Outgoing
from bufstore.jetstream.stream import NatsStream
from conftest import Deployment
from fault_proxy.proxy import FaultProxy
from helpers import eventually, fresh, run_of
from thorough import seldom


@pytest.mark.parametrize("replicas", [1, *seldom(3)])
async def test_messages_side_by_side_have_the_time_that_a_slow_link_takes(servers: Servers, replicas: int) -> None:
    """Together the messages take more than twice the time of one write, and bytes leave all the time."""
    server = servers.nats
    async with FaultProxy("127.0.0.1", server.port, protocol="nats") as proxy:
        connection = Connection(NatsConfig(servers=[server.url.replace(f":{server.port}", f":{proxy.port}")]), "test")
        await connection.open()
        stream = NatsStream(connection, "$JS.API", f"slow{replicas}", replicas)
        try:
            made = {"name": stream.name, "subjects": [f"{stream.name}.>"], "storage": "memory"}
            await stream.api(f"STREAM.CREATE.{stream.name}", made)
            proxy.to_server.bytes_per_s = 2 << 20
            found: dict[int, int | Exception] = {}
            messages = [Outgoing(f"{stream.name}.{n}", bytes(500_000)) for n in range(10)]
            await stream.publish_each(messages, 1.0, found.__setitem__)
            assert sorted(found.items()) == [(n, n + 1) for n in range(10)]
        finally:
            proxy.to_server.bytes_per_s = None
            await connection.aclose()


@pytest.mark.long  # as long as the link takes
async def test_a_large_entry_on_a_slow_link_costs_nobody_the_connection(deployment: Deployment) -> None:
    """The entry takes several times the time of a write; writes of other threads pass in between."""
    server = deployment.servers.nats
    size, bytes_per_s, timeout_s = 20 << 20, 2 << 20, 5.0
    async with FaultProxy("127.0.0.1", server.port, protocol="nats") as proxy:
        url = server.url.replace(f":{server.port}", f":{proxy.port}")
        async with deployment.store(nats=url, append_timeout_s=timeout_s, flusher=False) as store:
            small, large, stop = [fresh("small") for _ in range(4)], fresh("large"), asyncio.Event()
            for thread_id in small:
                await store.checkpoint(thread_id, [], run_of(thread_id))
            client = store.buffer.session.connection.client()
            proxy.to_server.bytes_per_s = bytes_per_s
            written = dict.fromkeys(small, 0)
            longest = 0.0

            async def write(thread_id: str) -> None:
                nonlocal longest
                while not stop.is_set():
                    began = time.monotonic()
                    with suppress(OutcomeUnknown, LogUnavailable):
                        await store.checkpoint_append(thread_id, ["small"], run_of(thread_id))
                        written[thread_id] += 1
                    longest = max(longest, time.monotonic() - began)

            writing = [asyncio.create_task(write(t)) for t in small]
            try:
                message = {"content": "x" * size, "id": "big"}
                with pytest.raises(OutcomeUnknown) as unknown:  # the call ends in time, and the sending goes on
                    await store.checkpoint(large, [message], run_of(large))

                async def stored() -> bool:
                    try:
                        receipt = await store.checkpoint(
                            large, [message], run_of(large), idempotency_key=unknown.value.token
                        )
                    except (OutcomeUnknown, LogUnavailable):
                        return False
                    return receipt.repeated

                await eventually(stored, 60)
                assert store.buffer.session.connection.client() is client, (
                    "the connection that all share was thrown away"
                )
            finally:
                stop.set()
                await asyncio.gather(*writing, return_exceptions=True)
            await asyncio.gather(*writing)
            proxy.to_server.heal()
            assert all(written.values()), "nothing went in between"
            assert longest < 2 * timeout_s, "a write did not end in its own time"
            assert await store.load_messages(large) == [message]


async def test_what_has_come_of_an_answer_when_the_time_is_over_counts(deployment: Deployment) -> None:
    """A process that is far behind makes progress, however slow its link is."""
    server = deployment.servers.nats
    async with FaultProxy("127.0.0.1", server.port, protocol="nats") as proxy:
        url = server.url.replace(f":{server.port}", f":{proxy.port}")
        async with deployment.store() as writer, deployment.store(nats=url, flusher=False) as reader:
            for _ in range(8):
                thread_id = fresh()
                await writer.checkpoint(thread_id, ["x" * (200 << 10)], run_of(thread_id))
            stream, groups = reader.buffer.session.stream, reader.buffer.parts.subjects.groups
            messages, more = await stream.part(groups, 0, 5.0, 1000)
            assert not more
            some, left = await stream.part(groups, 0, 5.0, 1000, 300 << 10)
            assert some == messages[: len(some)]
            assert sum(len(m.body) for m in some[:-1]) < 300 << 10 <= sum(len(m.body) for m in some)
            assert left == len(messages) - len(some)
            proxy.to_client.bytes_per_s = 150 << 10
            came, left = await stream.part(groups, 0, 6.0, 1000)
            assert 0 < len(came) < len(messages)
            assert (came, left) == (messages[: len(came)], len(messages) - len(came))
            proxy.to_client.heal()


@pytest.mark.parametrize("asked", ["one write", "several writes", "a request", "a read"])
async def test_an_answer_that_came_while_the_loop_stood_still_counts(deployment: Deployment, asked: str) -> None:
    """Regression: the deadline was over before the answer was read, and a write took the connection of all with it."""
    async with deployment.store(flusher=False) as store:
        connection: Connection = store.buffer.session.connection  # type: ignore[attr-defined]
        stream, ended = store.buffer.session.stream, dict[int, Any]()
        client = connection.client()
        count = 3 if asked == "several writes" else 1

        async def ask() -> None:
            if asked == "a request":
                ended[0] = await connection.request("$JS.API.INFO", b"", 1.0)
            elif asked == "a read":
                ended[0] = await stream.part("nothing.here", 0, 1.0, 1)
            else:
                messages = [Outgoing(f"$KV.{deployment.log.bucket}.probe{n}", b"") for n in range(count)]
                await connection.write_each(messages, 1.0, ended.__setitem__)

        asking = asyncio.create_task(ask())
        for _ in range(3):  # it is sent
            await asyncio.sleep(0)
        time.sleep(1.5)  # noqa: ASYNC251
        await asking
        assert sorted(ended) == list(range(count))
        assert not [outcome for outcome in ended.values() if isinstance(outcome, Exception)]
        assert connection.client() is client
