"""Asking a pull consumer for deliveries: none is lost, whatever becomes of the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.errors import ConnectionClosedError, Error

from bufstore.errors import ConfigError, LogUnavailable
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.pulls import Delivery, PullRefused, Pulls

_REPLY = "$JS.ACK.stream.consumer.1.7.7.0.0"


class _Client:
    """A client that keeps what is published."""

    max_payload, is_connected = 1, False

    def __init__(self) -> None:
        self.published: list[tuple[str, bytes]] = []
        self.last_error: Exception | None = None
        #: Ends each question that is open.
        self.ends: list[Any] = []

    async def publish(self, subject: str, payload: bytes = b"", **_: Any) -> None:
        self.published.append((subject, payload))


def _pulls(client: Any) -> Pulls:
    @contextmanager
    def answers(subject: str, heard: Any, end: Any) -> Iterator[str]:
        assert subject == "next"
        client.ends.append(end)
        try:
            yield "elsewhere"
        finally:
            client.ends.remove(end)

    hooks = {"on_connect": lambda _: None, "on_lost": lambda _: None}
    connection = SimpleNamespace(client=lambda: client, answers=answers, **hooks)
    return Pulls(cast(Connection, connection), "consumer", "next", 30.0)


async def _asked(pulls: Pulls, asking: Any) -> asyncio.Task[Any]:
    """Start the call; return once it waits."""
    task = asyncio.ensure_future(asking)
    while not pulls._waiting:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return task


async def test_what_has_come_for_a_call_that_is_cancelled_goes_to_others() -> None:
    client = _Client()
    pulls = _pulls(client)
    task = await _asked(pulls, pulls.ready(3))
    pulls._on_message("s.thread", _REPLY, b"", b"")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.published[-1] == (_REPLY, b"-NAK")


async def test_a_delivery_that_nobody_waits_for_goes_to_others() -> None:
    client = _Client()
    more = _pulls(client)._on_message("s.thread", _REPLY, b"", b"")
    assert more is not None
    await more
    assert client.published == [(_REPLY, b"-NAK")]


async def test_a_request_ends_with_what_came_or_with_why_nothing_does() -> None:
    pulls = _pulls(_Client())
    task = await _asked(pulls, pulls.ready(3))
    pulls._on_message("s.thread", _REPLY, b"", b"")
    pulls._on_message("inbox.0", "", b"", b"NATS/1.0 404 No Messages\r\n\r\n")
    assert [(d.subject, d.seq, d.times) for d in await task] == [("s.thread", 7, 1)]
    task = await _asked(pulls, pulls.next(5))
    pulls._on_message("inbox.1", "", b"", b"NATS/1.0 409 Exceeded MaxWaiting\r\n\r\n")
    with pytest.raises(PullRefused) as caught:
        await task
    assert caught.value.code == "409"
    assert str(caught.value) == "the consumer answers: 409 Exceeded MaxWaiting"


async def test_a_request_that_no_consumer_serves_ends_with_what_to_do() -> None:
    pulls = _pulls(_Client())
    gone = "the consumer is gone, or has no leader now: if this lasts, open again, which creates it"
    for n, (code, says) in enumerate((("503", gone), ("409", "the consumer answers: 409"))):
        task = await _asked(pulls, pulls.next(5))
        pulls._on_message(f"inbox.{n}", "", b"", b"NATS/1.0 %s\r\n\r\n" % code.encode())
        with pytest.raises(PullRefused) as caught:
            await task
        assert (caught.value.code, str(caught.value)) == (code, says)


async def test_a_request_that_nats_does_not_permit_says_so_at_once() -> None:
    """Nothing came, time and again, and nobody was told why."""
    client = _Client()
    pulls = _pulls(client)
    task = await _asked(pulls, pulls.next(60))
    client.ends[0](ConfigError("not permitted"))
    with pytest.raises(ConfigError, match="not permitted"):
        await task
    assert not client.ends


async def test_while_nats_permits_no_answers_an_empty_request_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not answered comes again only after a while, and may be as much as may be unanswered."""
    client, now = _Client(), 0.0
    pulls = _pulls(client)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now, raising=False)

    async def nothing() -> Any:
        task = await _asked(pulls, pulls.next(1))
        for token in list(pulls._waiting):
            pulls._on_message(f"inbox.{token}", "", b"", b"NATS/1.0 408 Request Timeout\r\n\r\n")
        return await task

    assert await nothing() is None
    client.last_error = Error(f"nats: 'Permissions Violation for Publish to \"{_REPLY}\"'")
    for later in (1.0, 59.0):
        now = later
        with pytest.raises(ConfigError, match=r"\$JS\.ACK\.>"):
            await nothing()
    now = 62.0
    assert await nothing() is None, "the right may be back: by now it has been tried again"
    client.last_error = Error(f"nats: 'Permissions Violation for Publish to \"{_REPLY}\"'")
    with pytest.raises(ConfigError):
        await nothing()
    now = 63.0
    await pulls.answer(Delivery("s.thread", 7, 1, _REPLY), b"+ACK")
    for later, told in ((64.0, True), (66.0, False)):
        now = later
        with pytest.raises(ConfigError) if told else nullcontext():
            assert await nothing() is None, "an answer was not refused"


async def test_a_connection_that_is_lost_while_work_is_asked_for_leaves_nothing_unlooked_at() -> None:
    class Lost(_Client):
        async def publish(self, *_: Any, **__: Any) -> None:
            pulls._lost()
            raise ConnectionClosedError

    pulls = _pulls(Lost())
    with pytest.raises(LogUnavailable):
        await pulls.next(5)
