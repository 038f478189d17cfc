"""Connections to NATS: round trips, lost links, refusals and unknown outcomes."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from bufstore.config import NatsConfig
from bufstore.errors import BufstoreError, Closed, ConfigError, LogFull, LogUnavailable
from bufstore.home import Home
from bufstore.jetstream import client as clients
from bufstore.jetstream import credentials, exchange, frames, server_choice
from bufstore.jetstream import subscriptions as subscriptions_
from bufstore.jetstream.client import (
    ListeningClient,
    check_room,
    close_client,
    new_client,
    refusal,
    round_trip,
    text_of,
    violation,
)
from bufstore.jetstream.connection import LOGINS, Connection
from bufstore.jetstream.errors import MessageTooLarge
from bufstore.jetstream.failures import may_not_publish, why
from bufstore.jetstream.messages import AppendUnknown, Outgoing
from bufstore.jetstream.questions import Doubt, Questions
from bufstore.jetstream.side_by_side import SideBySide
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subscriptions import Subscriptions
from bufstore.mailbox.nats import NatsMailboxStore


async def test_closing_ends_although_connecting_swallows_that_it_was_cancelled() -> None:
    connection, begun = Connection(NatsConfig(servers=["nats://127.0.0.1:1"]), "test"), asyncio.Event()

    async def swallows() -> None:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        connection._lost.clear()  # it is connected

    connection._connect = swallows  # type: ignore[method-assign]
    connection._closed, connection._home = False, Home()
    connection._lost.set()
    connection._supervisor = asyncio.create_task(connection._supervise())
    await begun.wait()
    async with asyncio.timeout(10):
        await connection.aclose()


async def test_what_was_not_opened_is_closed() -> None:
    connection = Connection(NatsConfig(), "test")
    with pytest.raises(Closed):
        connection.client()
    async with asyncio.timeout(10):
        with pytest.raises(Closed):
            await connection.wait_up(3600)
    mailbox = NatsMailboxStore(NatsConfig())
    for call in (mailbox.enqueue("thread"), mailbox.claim("thread", "w"), mailbox.load_dispatch("thread", "id")):
        async with asyncio.timeout(10):
            with pytest.raises(Closed):
                await call


async def test_who_waits_for_a_connection_hears_that_it_is_closed() -> None:
    connection = Connection(NatsConfig(servers=["nats://127.0.0.1:1"]), "test")
    connection._closed, connection._home = False, Home()
    waiting = [asyncio.create_task(connection.wait_up(3600)) for _ in range(2)]
    await asyncio.sleep(0)
    await connection.aclose()
    async with asyncio.timeout(10):
        for task in waiting:
            with pytest.raises(Closed):
                await task


class Recorder:
    """A minimal NATS server that remembers what clients sent."""

    def __init__(self) -> None:
        self.verbs: list[str] = []
        #: PINGs are answered while this is set.
        self.answers = asyncio.Event()
        self.answers.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}\r\n')
        while line := await reader.readline():
            verb = line.split()[0].decode()
            self.verbs.append(verb)
            if verb == "PUB":
                await reader.readexactly(int(line.split()[-1]) + 2)
            elif verb == "PING":
                await self.answers.wait()
                writer.write(b"PONG\r\n")
        writer.close()


@pytest.fixture
async def client_and_server() -> AsyncIterator[tuple[Client, Recorder]]:
    recorder = Recorder()
    server = await asyncio.start_server(recorder.serve, "127.0.0.1", 0)
    client = Client()
    await client.connect(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", allow_reconnect=False)
    recorder.verbs.clear()
    yield client, recorder
    await client.close()
    server.close()
    await server.wait_closed()


async def test_a_round_trip_comes_after_the_subscription(client_and_server: tuple[Client, Recorder]) -> None:
    client, server = client_and_server
    await client.subscribe("a")
    await round_trip(client)
    assert server.verbs == ["SUB", "PING"]


async def test_a_round_trip_comes_after_the_message(client_and_server: tuple[Client, Recorder]) -> None:
    client, server = client_and_server
    for _ in range(3):
        await client.publish("a", b"x")
    await round_trip(client)
    assert server.verbs == ["PUB"] * 3 + ["PING"]


async def test_a_late_answer_to_a_round_trip_that_was_given_up_ends_no_client(
    client_and_server: tuple[Client, Recorder],
) -> None:
    client, server = client_and_server
    server.answers.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await round_trip(client)
    with pytest.raises(nats.errors.TimeoutError):
        await round_trip(client, 0.05)
    server.answers.set()
    await round_trip(client, 10)


async def test_a_round_trip_on_a_connection_that_is_lost_ends_at_once(
    client_and_server: tuple[Client, Recorder],
) -> None:
    client, server = client_and_server
    server.answers.clear()
    waiting = asyncio.create_task(round_trip(client, 3600))
    while server.verbs != ["PING"]:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await client.close()
    server.answers.set()
    async with asyncio.timeout(10):
        with pytest.raises(nats.errors.ConnectionClosedError):
            await waiting


async def test_a_subscription_without_an_answer_is_log_unavailable_and_on_a_lost_connection_is_made_again() -> None:
    async def heard(_: Msg) -> None: ...

    recorder, end = Recorder(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.create_task(recorder.serve(reader, writer))
        await end.wait()
        serving.cancel()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = Connection(NatsConfig(servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"]), "test")
    subscriptions = Subscriptions(connection)
    await connection.open()
    try:
        recorder.answers.clear()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(LogUnavailable, match="FlushTimeoutError"):
            patch.setattr(subscriptions_, "check_room", partial(check_room, timeout_s=0.05))
            await subscriptions.add("a", heard)
        assert subscriptions.kept == []
        recorder.answers.set()
        await round_trip(connection.client())
        recorder.answers.clear()
        recorder.verbs.clear()
        adding = asyncio.create_task(subscriptions.add("b", heard))
        while "PING" not in recorder.verbs:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        end.set()
        async with asyncio.timeout(5):
            await adding
        assert len(subscriptions.kept) == 1
    finally:
        end.set()
        recorder.answers.set()
        await connection.aclose()
        server.close()
        await server.wait_closed()


async def test_who_is_cancelled_while_too_few_subscriptions_are_permitted_is_cancelled() -> None:
    server = await asyncio.start_server(Recorder().serve, "127.0.0.1", 0)
    connection = Connection(NatsConfig(servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"]), "test")
    begun = asyncio.Event()

    async def hook(client: ListeningClient) -> None:
        client.no_room = 1
        begun.set()
        await asyncio.Event().wait()

    connection.on_connect(hook)
    try:
        opening = asyncio.create_task(connection.open())
        await begun.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    ("last", "told"),
    [('permissions violation for subscription to "a"', False), ("maximum connections exceeded", True), (None, False)],
)
def test_only_what_closed_a_connection_is_told_as_the_reason(last: str | None, told: bool) -> None:
    client, closed = ListeningClient(), nats.errors.ConnectionClosedError()
    client._err = None if last is None else nats.errors.Error(f"nats: {last}")
    assert why(closed, client, "nats://a") is (client._err if told else closed)


def test_of_what_nats_said_the_last_refusal_of_a_kind_is_found() -> None:
    texts = ['publish to "t.sched"', 'subscription to "t.sched"', 'publish to "t.sched"', 'publish to "t.owls"']
    errors = [nats.errors.Error(f"nats: permissions violation for {text}") for text in texts]
    ours, apps = ListeningClient(), Client()
    ours._subs[1] = SimpleNamespace(subject="T.sched")  # type: ignore[assignment]
    for error in [*errors, OSError("away")]:
        ours.note(error)
    assert refusal(ours, "publish", "t.Sched") is errors[2]
    assert refusal(ours, "subscription", "t.sched") is errors[1]
    assert refusal(ours, "subscription", "t.owls") is None
    assert refusal(apps, "publish", "t.owls") is None
    apps._err = errors[3]
    assert refusal(apps, "publish", "t.owls") is errors[3]
    assert refusal(apps, "publish", "t.sched") is None


def test_a_subscription_that_was_taken_is_told_from_one_that_was_refused() -> None:
    said = 'nats: permissions violation for subscription to "aa"'
    assert violation(nats.errors.Error(said + ' (sid "1")')) == ("subscription", "aa", True)
    assert violation(nats.errors.Error(said + ' using queue "q"')) == ("subscription", "aa", False)
    assert violation(nats.errors.Error('nats: Permissions Violation for Publish to "A.b"')) == ("publish", "a.b", False)
    assert violation(OSError("away")) is None


async def test_a_request_that_was_sent_once_has_an_unknown_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer it is sent again, and the connection is gone by then: the first one may have arrived."""
    server = await asyncio.start_server(Recorder().serve, "127.0.0.1", 0)
    connection = Connection(NatsConfig(servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"]), "test")
    post, posts = frames.post, 0

    async def once(client: Client, subject: str, payload: bytes, reply: str) -> None:
        nonlocal posts
        posts += 1
        if posts > 1:
            raise nats.errors.OutboundBufferLimitError
        await post(client, subject, payload, reply)

    monkeypatch.setattr(frames, "post", once)
    monkeypatch.setattr(exchange, "AGAIN_S", 0.001)
    await connection.open()
    try:
        with pytest.raises(AppendUnknown):
            await connection.request("silent", b"", 10, again=True)
    finally:
        await connection.aclose()
        server.close()
        await server.wait_closed()
    assert posts == 2


@pytest.mark.long
async def test_a_link_that_stalls_under_load_holds_up_no_call_and_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that cannot leave makes more calls wait than nats-py has places for."""
    monkeypatch.setattr(credentials, "_PING_INTERVAL_S", 1)
    stalled, lost = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.create_task(Recorder().serve(reader, writer))
        await stalled.wait()
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await lost.wait()
        serving.cancel()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = Connection(NatsConfig(servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"]), "test")
    connection.on_lost(lost.set)
    await connection.open()
    try:
        stalled.set()
        await connection.client().publish("a", bytes(1 << 20))
        async with asyncio.timeout(5):
            while not frames._unsent(connection.client()):
                await connection.client().publish("a", bytes(1 << 20))
                await asyncio.sleep(0)
        await connection.client().publish("a", b"x")  # this wakes the writing task
        asked = [asyncio.create_task(connection.request("silent", b"", 0.5)) for _ in range(1500)]
        _, late = await asyncio.wait(asked, timeout=10)
        assert not late
        assert all(isinstance(task.exception(), AppendUnknown) for task in asked)
        async with asyncio.timeout(10):
            await lost.wait()
    finally:
        lost.set()
        await connection.aclose()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("refusal", [ConfigError("not here"), LogUnavailable("not yet"), ValueError("odd")])
async def test_what_is_wrong_with_one_server_does_not_keep_the_others_from_being_tried(refusal: Exception) -> None:
    server = await asyncio.start_server(Recorder().serve, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connection, clients = Connection(NatsConfig(servers=[url, url]), "test"), list[Client]()
    refused = {1}

    async def look(client: Client) -> None:
        clients.append(client)
        if len(clients) in refused:
            raise refusal

    connection.on_connect(look)
    try:
        await connection.open()
        assert connection.client() is clients[1]
        await connection.aclose()
        refused = {3, 4}
        with pytest.raises(LogUnavailable if isinstance(refusal, LogUnavailable) else ConfigError, match=str(refusal)):
            await connection.open()
        assert [client.is_closed for client in clients] == [True] * 4
    finally:
        await connection.aclose()
        server.close()
        await server.wait_closed()


async def test_what_a_lost_connection_held_never_arrives() -> None:
    """The link stalls, a write gets no answer, and the connection is checked; then the link is back."""
    stalled, back, ended, subjects = asyncio.Event(), asyncio.Event(), asyncio.Event(), set[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}\r\n')
        with suppress(OSError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                if stalled.is_set():
                    await back.wait()
                words = line.split()
                if words[0] == b"PING":
                    writer.write(b"PONG\r\n")
                elif words[0] == b"PUB":
                    subjects.add(words[1])
                    await reader.readexactly(int(words[-1]) + 2)
        writer.close()
        if stalled.is_set():
            ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = Connection(NatsConfig(servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"]), "test")
    await connection.open()
    try:
        client = connection.client()
        stalled.set()
        while not client._pending_data_size or not frames._unsent(client):
            await client.publish("large", bytes(1 << 20))
            await asyncio.sleep(0)
        with pytest.raises(AppendUnknown):
            await connection.write([Outgoing("late", b"x")], "", 0.1)
        while connection._client is client:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        back.set()
        async with asyncio.timeout(10):
            await ended.wait()
        assert b"large" in subjects
        assert b"late" not in subjects
    finally:
        await connection.aclose()
        server.close()
        await server.wait_closed()


class TwoLeaders(Recorder):
    """Two nodes that both believe they lead: the first refuses for lack of space, the other stores, at some time."""

    FULL = b'{"error":{"code":503,"err_code":10077,"description":"maximum bytes exceeded"},"stream":"s"}'

    def __init__(self, stores: bool, before_proof: bool) -> None:
        super().__init__()
        self._stores, self._before_proof = stores, before_proof

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}\r\n')

        def answer(words: list[bytes], payload: bytes) -> None:
            writer.write(b"MSG %b 1 %d\r\n%b\r\n" % (words[2], len(payload), payload))

        published: list[list[bytes]] = []
        while line := await reader.readline():
            words = line.split()
            if words[0] == b"PING":
                writer.write(b"PONG\r\n")
            elif words[0] == b"PUB":
                await reader.readexactly(int(words[-1]) + 2)
                self.verbs.append(words[1].decode())
                proves = words[1].startswith(b"$JS.API.")
                if not proves:
                    published.append(words)
                    answer(words, self.FULL)
                if self._stores and proves is self._before_proof:
                    for asked in published:
                        answer(asked, b'{"stream":"s","seq":7}')
                if b".PURGE." in words[1]:
                    answer(words, b'{"success":true,"purged":0}')
                elif proves:
                    answer(words, b'{"error":{"code":404,"err_code":10057,"description":"no message found"}}')
        writer.close()


@pytest.mark.parametrize("answer", [b"", b"{", b"[]", b'{"error":1}', b'{"error":{"description":"\xff"}}'])
async def test_an_answer_that_is_none_is_told_as_an_error_of_ours(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the error was one of msgspec's, which no caller expects."""
    connection = Connection(NatsConfig(), "test")
    stream = NatsStream(connection, "$JS.API", "s", 1)

    async def answers(*_: object, **__: object) -> bytes:
        return answer

    monkeypatch.setattr(connection, "request", answers)
    monkeypatch.setattr(connection, "write", answers)
    for call in (stream.info(), stream.identity(1), stream.prove("unused", 1)):
        with pytest.raises(LogUnavailable):
            await call
    with pytest.raises(AppendUnknown):
        await stream.publish(Outgoing("a", b"x"), 1)
    answer = b'{"message":null}'
    with pytest.raises(LogUnavailable):
        await stream.identity(1)


@pytest.mark.parametrize("before_proof", [True, False])
@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(("consumed", "proof"), [(False, "PURGE"), (True, "MSG.DELETE")])
async def test_a_refusal_of_a_node_that_leads_no_more_is_not_believed(
    stores: bool, before_proof: bool, replicas: int, consumed: bool, proof: str
) -> None:
    """A caller that is told that nothing was stored writes again, though the leading node has stored it."""
    leaders = TwoLeaders(stores, before_proof)
    server = await asyncio.start_server(leaders.serve, "127.0.0.1", 0)
    nats_ = NatsConfig(servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
    connection = Connection(nats_, "test")
    stream = NatsStream(connection, nats_.api, "s", replicas, consumed_whole=consumed)
    await connection.open()
    try:
        if replicas > 1 and stores:
            assert await stream.publish(Outgoing("a", b"x"), 10) == 7
        else:
            with pytest.raises(LogFull):
                await stream.publish(Outgoing("a", b"x"), 10)
    finally:
        await connection.aclose()
        server.close()
        await server.wait_closed()
    assert not len(connection._questions)
    proofs = [f"$JS.API.STREAM.{proof}.s"] if replicas > 1 else []
    if replicas == 1 or before_proof or not stores:  # otherwise both answers may have come before either was looked at
        assert leaders.verbs == ["a", *proofs]


@pytest.mark.parametrize("count", [1, 3])
async def test_of_several_messages_side_by_side_no_refusal_of_such_a_node_is_believed_either(count: int) -> None:
    leaders = TwoLeaders(stores=True, before_proof=False)
    server = await asyncio.start_server(leaders.serve, "127.0.0.1", 0)
    nats_ = NatsConfig(servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
    connection = Connection(nats_, "test")
    stream = NatsStream(connection, nats_.api, "s", 3)
    told: dict[int, int | Exception] = {}
    await connection.open()
    try:
        await stream.publish_each([Outgoing("a", b"x")] * count, 10, told.__setitem__)
    finally:
        await connection.aclose()
        server.close()
        await server.wait_closed()
    assert told == dict.fromkeys(range(count), 7)


async def test_what_was_refused_and_not_proven_may_be_stored() -> None:
    connection = Connection(NatsConfig(), "test")

    async def post(reply: str) -> None:
        connection._on_answer(reply, "", TwoLeaders.FULL, b"")

    async def prove() -> None:
        raise LogUnavailable("nobody leads")

    with pytest.raises(AppendUnknown, match="nobody leads"):
        await connection._answer(["a"], post, 10, doubt=Doubt(lambda _: True, prove))
    assert not len(connection._questions)


async def test_of_several_messages_what_no_proof_decides_may_be_stored_and_the_rest_is_told() -> None:
    ends: dict[int, bytes | Exception] = {}
    proofs = [asyncio.Event() for _ in range(3)]
    begun = iter(range(3))

    async def prove(doubt: Doubt) -> None:
        await doubt.prove()
        proof = next(begun)
        await proofs[proof].wait()
        if proof == 2:
            raise AppendUnknown("nobody leads")

    async def nothing() -> None: ...

    it = SideBySide(5, ends.__setitem__, Doubt(lambda answer: answer == b"no", nothing))
    waiting = asyncio.create_task(it.all_ended(prove))
    assert not it.heard(0, b"yes")
    assert it.heard(1, b"no")
    assert it.heard(2, b"no")
    await asyncio.sleep(0)
    assert it.heard(3, b"no"), "behind the proof that has begun"
    assert not it.heard(2, b"yes")
    proofs[0].set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ends == {0: b"yes", 2: b"yes", 1: b"no"}
    assert not it.heard(1, b"yes"), "it has ended"
    proofs[1].set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 3 in ends
    assert it.heard(4, b"no")
    proofs[2].set()
    with pytest.raises(AppendUnknown, match="nobody leads"):
        await waiting
    assert ends == {0: b"yes", 2: b"yes", 1: b"no", 3: b"no"}
    assert not it.heard(4, AppendUnknown("nobody leads"))
    assert isinstance(ends[4], AppendUnknown)


class Leaderless(Recorder):
    """A node that is cut off from its cluster."""

    #: The other nodes' addresses, which it tells its clients at once or `later`.
    told: Sequence[str] = ()
    later = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tell(writer, () if self.later else self.told)
        while line := await reader.readline():
            words = line.split()
            if words[0] == b"PING":
                writer.write(b"PONG\r\n")
                if self.later:
                    self._tell(writer, self.told)
            elif words[0] == b"PUB":
                await reader.readexactly(int(words[-1]) + 2)
                self.verbs.append("PUB")
                status = b"NATS/1.0 503\r\n\r\n"
                writer.write(b"HMSG %b 1 %d %d\r\n%b\r\n" % (words[2], len(status), len(status), status))
        writer.close()

    def _tell(self, writer: asyncio.StreamWriter, urls: Sequence[str]) -> None:
        info = {"server_id": "x", "version": "2.15.1", "max_payload": 1048576, "headers": True, "connect_urls": urls}
        writer.write(b"INFO %b\r\n" % json.dumps(info).encode())


@pytest.mark.parametrize("other", ["behind the same address", "given", "told", "told later"])
async def test_a_node_that_is_cut_off_from_its_cluster_is_left_for_another(other: str) -> None:
    alone, leads = Leaderless(), TwoLeaders(stores=True, before_proof=False)
    nodes = itertools.chain([alone], itertools.repeat(leads))

    async def balanced(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next(nodes).serve(reader, writer)

    serves = [balanced] if other == "behind the same address" else [alone.serve, leads.serve]
    servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for serve in serves]
    addresses = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    if other.startswith("told"):
        alone.told, alone.later = addresses[1:], other == "told later"
        del addresses[1:]
    nats_ = NatsConfig(servers=[f"nats://{address}" for address in addresses])
    connection = Connection(nats_, "test")
    given = connection._choice.given
    connection._choice = server_choice.ServerChoice(given, len(given) - 1, _patience_s=0.2)
    stream = NatsStream(connection, nats_.api, "s", 3)
    await connection.open()
    try:
        async with asyncio.timeout(20):
            while True:
                with suppress(AppendUnknown, LogUnavailable):
                    assert await stream.publish(Outgoing("a", b"x"), 10) == 7
                    break
                await asyncio.sleep(0)
    finally:
        await connection.aclose()
        for server in servers:
            server.close()
            await server.wait_closed()
    assert alone.verbs


async def test_a_late_answer_to_a_read_says_nothing_of_the_server() -> None:
    """What is stored may quote an error of NATS. Such answers to reads that were given up ended healthy connections."""
    connection, quoted = Connection(NatsConfig(), "test"), b'{"tool failed": {"error":{"code":503,"err_code":10008}}}'
    before, heard = replace(connection._choice), list[bytes]()
    with connection.answers("a", lambda data, headers: heard.append(data), lambda _: False) as reply:
        connection._on_answer(reply, "", quoted, b"")
    connection._on_answer(reply, "", quoted, b"")
    connection._on_answer(reply, "", b"", b"NATS/1.0 503\r\n\r\n")
    assert heard == [quoted]
    assert connection._choice == before


async def test_connections_that_are_ended_at_once_are_made_ever_more_slowly(caplog: pytest.LogCaptureFixture) -> None:
    recorder, writers = Recorder(), list[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await recorder.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connection = Connection(NatsConfig(servers=[url]), "test")
    await connection.open()
    try:
        for _ in range(6):
            client = await connection.wait_up(10)
            writers[-1].close()
            async with asyncio.timeout(10):
                while connection._client is client:  # noqa: ASYNC110
                    await asyncio.sleep(0)
    finally:
        await connection.aclose()
        server.close()
        await server.wait_closed()
    assert connection._lives._pause_s >= 0.16
    assert [getattr(r, "action", "") for r in caplog.records].count("nats_lost") == 1


async def test_an_outage_soon_after_a_reconnection_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    writers = list[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await Recorder().serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = Connection(NatsConfig(servers=[f"nats://127.0.0.1:{port}"]), "test")
    told = list[str]()

    def said() -> list[str]:
        return [a for r in caplog.records if (a := getattr(r, "action", "")).startswith("nats_")]

    async def until(action: str) -> None:
        told.append(action)
        async with asyncio.timeout(10):
            while said() != told:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    await connection.open()
    connection._lives.made(0)  # the connection counts as one that has lived long
    try:
        for _ in range(2):
            server.close()
            writers[-1].close()
            await server.wait_closed()
            await until("nats_lost")
            server = await asyncio.start_server(serve, "127.0.0.1", port)
            await until("nats_connected")
    finally:
        await connection.aclose()
        server.close()
        await server.wait_closed()


async def test_why_a_server_ends_a_connection_at_once_is_told() -> None:
    async def full(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}'
        writer.write(info + b"\r\n-ERR 'maximum connections exceeded'\r\n")
        writer.close()

    server = await asyncio.start_server(full, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for _ in range(10):  # sometimes nats-py itself reads the error
        with pytest.raises(LogUnavailable, match="maximum connections exceeded"):
            await Connection(NatsConfig(servers=[url]), "test").open()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("late", [LOGINS - 1, LOGINS])
async def test_a_login_that_comes_too_late_is_tried_again(late: int) -> None:
    """Regression: a process that was busy for two seconds just then did not start."""
    recorder, logins = Recorder(), itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if next(logins) >= late:
            await recorder.serve(reader, writer)
            return
        info = b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true,"auth_required":true}'
        writer.write(info + b"\r\n-ERR 'Authentication Timeout'\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    # One of the servers is away, which says less.
    urls = [f"nats://127.0.0.1:{port}" for port in (server.sockets[0].getsockname()[1], 1)]
    connection = Connection(NatsConfig(servers=urls), "test")
    if late < LOGINS:
        await connection.open()
        await connection.aclose()
    else:
        with pytest.raises(LogUnavailable, match=r"(?i)authentication timeout"):
            await connection.open()
    assert next(logins) == LOGINS
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("told", [False, True])
async def test_a_connection_that_the_server_ends_with_bytes_unsent_leaves_no_task_behind(told: bool) -> None:
    """Regression: nats-py sent the rest first, failed, and its subscriptions waited until they were collected."""
    writers, failed, closed = list[asyncio.StreamWriter](), list[dict[str, Any]](), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(ConnectionError):
            await Recorder().serve(reader, writer)

    async def on_closed() -> None:
        closed.set()

    async def refuses() -> None:
        raise BrokenPipeError

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    before = asyncio.all_tasks()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    client = ListeningClient()
    await client.connect(url, allow_reconnect=False, closed_cb=on_closed)
    await client.subscribe("a", cb=_nothing)
    await round_trip(client)
    client._transport.drain = refuses  # type: ignore[union-attr, method-assign]
    client._pending, client._pending_data_size = [b"PUB a 1\r\nx\r\n"], 13
    if told:
        writers[0].write(b"-ERR 'User Authentication Expired'\r\n")
    else:
        writers[0].close()
    async with asyncio.timeout(10):
        await closed.wait()
    server.close()
    await server.wait_closed()
    async with asyncio.timeout(10):
        while asyncio.all_tasks() - before:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert not failed


async def test_what_is_not_permitted_ends_no_connection_and_drops_nothing() -> None:
    recorder, writers = Recorder(), list[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await recorder.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = ListeningClient()
    await client.connect(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", allow_reconnect=False)
    writers[0].write(b"-ERR 'Permissions Violation for Publish to \"x\"'\r\n")
    await round_trip(client)
    recorder.verbs.clear()
    await client.publish("a", b"x")
    await client.close()  # this sends what is left
    async with asyncio.timeout(10):
        while "PUB" not in recorder.verbs:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    server.close()
    await server.wait_closed()


async def _nothing(_: Msg) -> None:
    pass


def test_a_url_in_an_error_keeps_all_but_its_login() -> None:
    error = ValueError("refused the credentials (nats://user:secret@host:4222): no; (nats://host:1) a@b")
    assert text_of(error) == "ValueError: refused the credentials (nats://***@host:4222): no; (nats://host:1) ***@b"


async def test_a_message_larger_than_the_server_takes_is_not_sent_and_costs_no_connection() -> None:
    recorder = Recorder()
    server = await asyncio.start_server(recorder.serve, "127.0.0.1", 0)
    connection = Connection(NatsConfig(servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"]), "test")
    large, told = Outgoing("a", bytes(1 << 20), "a header"), dict[int, bytes | Exception]()
    await connection.open()
    try:
        with pytest.raises(MessageTooLarge):
            await connection.request("a", bytes((1 << 20) + 1), 10)
        with pytest.raises(MessageTooLarge):
            await connection.write([large], "", 10)
        await connection.write_each([large, large], 10, told.__setitem__)
        assert [type(outcome) for outcome in told.values()] == [MessageTooLarge] * 2
        await round_trip(connection.client())
        assert "PUB" not in recorder.verbs
        assert "HPUB" not in recorder.verbs
    finally:
        await connection.aclose()
        server.close()
        await server.wait_closed()


async def test_of_several_messages_one_that_is_too_large_ends_no_other() -> None:
    """Regression: all of them were said to be too large, although each of them is a write of its own."""
    server = await asyncio.start_server(TwoLeaders(stores=True, before_proof=False).serve, "127.0.0.1", 0)
    connection = Connection(NatsConfig(servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"]), "test")
    large, told = Outgoing("large", bytes((1 << 20) + 1)), dict[int, bytes | Exception]()
    await connection.open()
    try:
        await connection.write_each([Outgoing("a", b"x"), large, Outgoing("b", b"x")], 10, told.__setitem__)
        assert isinstance(told.pop(1), MessageTooLarge)
        assert told == dict.fromkeys((0, 2), TwoLeaders.FULL), "the answers of the server"
    finally:
        await connection.aclose()
        server.close()
        await server.wait_closed()


async def test_a_client_whose_connection_was_aborted_leaves_no_task_behind() -> None:
    """nats-py ends its subscriptions last, and a drain that fails comes before; nobody else would end their tasks."""

    async def close() -> None:
        raise ConnectionResetError("Connection lost")

    tasks = [asyncio.create_task(asyncio.sleep(3600)) for _ in range(3)]
    subscriptions = dict(enumerate(SimpleNamespace(_wait_for_msgs_task=task) for task in (*tasks, None)))
    client: Any = SimpleNamespace(close=close, _subs=subscriptions)
    await close_client(client)
    await asyncio.wait(tasks, timeout=5)
    assert all(task.cancelled() for task in tasks)


async def test_messages_for_a_connection_that_is_not_there_are_certainly_not_sent() -> None:
    """Several at once were told as maybe stored, and one alone as not."""
    connection = Connection(NatsConfig(), "x")
    told: dict[int, Any] = {}
    with pytest.raises(BufstoreError) as refused:
        await connection.write_each([Outgoing("a", b""), Outgoing("b", b"")], 1.0, told.__setitem__)
    assert not told
    await connection.write_each([Outgoing("a", b"")], 1.0, told.__setitem__)
    assert type(told[0]) is type(refused.value)


@pytest.mark.parametrize(
    ("subject", "asked", "of_each"),
    [
        ("tokens.item.a", ["tokens.item.a"], ConfigError),
        ("tokens.item.a", ["tokens.item.a", "tokens.item.A"], AppendUnknown),
        ("$KV.b.k", ["$JS.hub.API.$KV.b.k"] * 2, AppendUnknown),
        ("$JS.API.STREAM.INFO.S", ["$JS.API.STREAM.INFO.S"] * 2, ConfigError),
        ("$JS.API.STREAM.INFO.S", ["$JS.hub.API.STREAM.INFO.S"] * 2, ConfigError),
    ],
)
def test_of_several_writes_on_a_subject_nobody_knows_which_one_was_refused(
    subject: str, asked: list[str], of_each: type[Exception]
) -> None:
    """Regression: those that were stored before a right was taken away were told to be refused, and done twice."""
    questions, ended = Questions(), list[Any]()
    for one in asked:
        questions.ask([one], lambda outcome: bool(ended.append(outcome)))
    others = list[Any]()
    questions.ask(["another"], lambda outcome: bool(others.append(outcome)))
    questions.refuse(*may_not_publish(subject.lower(), "$js.hub.api"))
    assert [type(outcome) for outcome in ended] == [of_each] * len(asked)
    assert all("does not permit" in str(outcome) for outcome in ended)
    assert others == []


async def test_tls_that_a_url_can_never_have_is_a_misconfiguration(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("it connects")

    monkeypatch.setattr(Client, "connect", forbidden)
    monkeypatch.setattr(clients, "find_spec", lambda _: "aiohttp is there")
    tls = ssl.create_default_context()
    connection = Connection(NatsConfig(servers="ws://u:geheim@127.0.0.1:1", tls=tls), "test")
    with pytest.raises(ConfigError, match="use wss://") as caught:
        await connection.open()
    assert "geheim" not in str(caught.value)
    for url in "wss://127.0.0.1:1", "nats://127.0.0.1:1":
        new_client(NatsConfig(servers=url, tls=tls), url)
    new_client(NatsConfig(servers="ws://127.0.0.1:1"), "ws://127.0.0.1:1")


@pytest.mark.parametrize(
    ("subject", "told"),
    [
        ("$js.api.consumer.create.log.c-1.log.groups.0", "$js.api.consumer.create.log.>"),
        ("$js.hub.api.consumer.durable.create.log.c-1", "$js.hub.api.consumer.durable.create.log.>"),
        ("$js.api.consumer.msg.next.log.c-1", "$js.api.consumer.msg.next.log.>"),
        ("$js.api.consumer.info.log.c-1", "$js.api.consumer.info.log.>"),
        ("$js.api.consumer.names.log", "$js.api.consumer.names.log"),
        ("$js.api.stream.info.log", "$js.api.stream.info.log"),
    ],
)
def test_what_is_refused_about_a_consumer_is_told_without_its_name(subject: str, told: str) -> None:
    """Regression: each consumer that a flusher tried to make had a name of its own, and so an error of its own."""
    refused = may_not_publish(subject, "$JS.API")
    assert f"publish on '{told}' (" in str(refused.error)
    assert subject in refused.subjects, "it is known all the same which question was refused"


async def test_a_round_trip_on_a_stalled_link_ends_in_time_and_does_not_spin() -> None:
    """Regression: it took all of a core until the link was given up, whatever time the caller gave it."""
    looks = 0

    class Stalled:
        is_connected = True

        @property
        def pending_data_size(self) -> int:
            nonlocal looks
            looks += 1
            return 1

    with pytest.raises(nats.errors.FlushTimeoutError):
        await round_trip(Stalled(), 0.1)  # type: ignore[arg-type]
    assert looks < 200


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_credentials_with_a_damaged_seed_are_refused_before_anything_is_sent(ends: str) -> None:
    """Regression: apps tried to reach NATS for ever, and good ones with lines of Windows did, too."""
    nkeys = pytest.importorskip("nkeys")
    seed = nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_USER).decode()
    of = "-----BEGIN NATS USER JWT-----{0}a.b.c{0}------END NATS USER JWT------{0}-----BEGIN USER NKEY SEED-----{0}{1}"
    assert seed in str(credentials.read_credentials(of.format(ends, seed)))
    for damaged in (seed[:-1], seed.lower(), "", "\u00e4"):
        with pytest.raises(ConfigError, match="seed") as error:
            credentials.read_credentials(of.format(ends, damaged))
        assert not damaged or damaged not in str(error.value)
