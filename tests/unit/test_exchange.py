"""A message that is posted: what is told of it, and what becomes of its connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from nats.aio.client import Client

from bufstore.config import NatsConfig
from bufstore.errors import BufstoreError, LogUnavailable
from bufstore.jetstream.exchange import Exchange
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing
from bufstore.jetstream.stream import NatsStream
from unit.fake_log import run
from unit.test_frames import Socket, on_a_socket

_MESSAGE = Outgoing("log.groups", b"body", "1.header", expected=7)


class Here(Exchange):
    """An exchange on a socket that keeps what is written."""

    def __init__(self) -> None:
        super().__init__(NatsConfig(servers="nats://127.0.0.1"), 0)
        self.dropped: list[str] = []
        self.socket: Socket
        self._client: Any
        self._client, self.socket = on_a_socket()
        self._inbox = "_INBOX.here"

    def client(self) -> Any:
        if not self._client.is_connected:
            raise LogUnavailable("not connected")
        return self._client

    def _drop(self, client: Client, reason: str) -> None:
        self.dropped.append(reason)

    def on_connect(self, hook: Any) -> None:
        """Run no hook: nothing is connected here."""

    def answer(self, data: bytes) -> None:
        """Let an answer arrive to what was posted last."""
        token = list(self._questions._open)[-1]
        self._on_answer(f"{self._inbox}.{token}", "", data, b"")


def test_an_answer_is_told_and_the_connection_stays() -> None:
    async def main() -> None:
        here, told = Here(), list[bytes | Exception]()
        assert here.posts
        assert here.post(_MESSAGE, 5.0, told.append) is not None
        assert b"log.groups _INBOX.here.0 " in here.socket.data
        here.answer(b"{}")
        assert told == [b"{}"]
        assert here.dropped == []

    run(main())


@pytest.mark.parametrize("how", ["time", "lost"])
def test_without_an_answer_the_connection_is_thrown_away(how: str) -> None:
    """What is left in its buffers must not arrive after somebody has looked what is stored."""

    async def main() -> None:
        here, told = Here(), list[bytes | Exception]()
        here.post(_MESSAGE, 5.0, told.append)
        if how == "lost":
            here._questions.end_all(AppendUnknown("lost"))
        else:
            await asyncio.sleep(6)
        assert [type(outcome) for outcome in told] == [AppendUnknown]
        assert len(here.dropped) == 1

    run(main())


def test_nothing_is_posted_where_it_would_wait_or_cannot_be() -> None:
    async def main() -> None:
        told: list[bytes | Exception] = []
        for change in ({"_pending_data_size": 1}, {"_status": Client.DISCONNECTED}, {"_transport": None}):
            here = Here()
            for name, value in change.items():
                setattr(here._client, name, value)
            assert not here.posts
            assert here.post(_MESSAGE, 5.0, told.append) is None
            assert not here.socket.data
            assert not len(here._questions)
        here = Here()
        here._client._max_payload = 3
        assert here.post(_MESSAGE, 5.0, told.append) is None
        assert not len(here._questions)
        assert told == []

    run(main())


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({"stream": "S", "seq": 8}, 8),
        ({"error": {"code": 400, "err_code": 10071, "description": "wrong last sequence: 9"}}, Conflict),
        ({"stream": "S"}, AppendUnknown),
        ({"error": {"code": 503, "err_code": 10077, "description": "maximum bytes exceeded"}}, BufstoreError),
    ],
)
def test_what_a_stream_tells_of_a_posted_message_is_what_publish_would(
    answer: dict[str, Any], outcome: int | type[Exception]
) -> None:
    async def main() -> None:
        here, told = Here(), list[int | Exception]()
        stream = NatsStream(here, "$JS.API", "S", 1)  # type: ignore[arg-type]
        assert stream.posts
        stream.post(_MESSAGE, 5.0, told.append)
        here.answer(json.dumps(answer).encode())
        (found,) = told
        assert found == outcome if isinstance(outcome, int) else isinstance(found, outcome), found

    run(main())


def test_nothing_is_posted_to_replicas_where_a_refusal_has_to_be_proven() -> None:
    async def main() -> None:
        here, told = Here(), list[int | Exception]()
        stream = NatsStream(here, "$JS.API", "S", 3)  # type: ignore[arg-type]
        assert not stream.posts
        assert stream.post(_MESSAGE, 5.0, told.append) is None
        assert not here.socket.data

    run(main())
