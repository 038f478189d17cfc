"""What NATS answers to requests of its API: an answer that lacks something is an error of ours."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest

from bufstore.errors import LogUnavailable
from bufstore.jetstream.ensure import ensure_consumer, ensure_stream
from bufstore.jetstream.stream import NatsStream
from bufstore.nats.same_log import SameLog
from unit.fake_log import run

STREAM: dict[str, Any] = {
    "config": {"name": "s"},
    "created": "2026-01-01T00:00:00Z",
    "state": {"messages": 0, "last_seq": 1 << 60},
}
CONSUMER: dict[str, Any] = {"config": {"durable_name": "c"}}


def answering(answer: Any) -> NatsStream:
    async def request(*_: Any, **__: Any) -> bytes:
        return json.dumps(answer).encode()

    connection: Any = SimpleNamespace(request=request, on_connect=lambda _: None)
    return NatsStream(connection, "$JS.API", "s", 1)


def changed(answer: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The answer with another value at this path, or without it (...)."""
    answer = copy.deepcopy(answer)
    *above, last = path.split(".")
    place = answer
    for name in above:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return answer


@pytest.mark.parametrize("value", [..., None])
@pytest.mark.parametrize("path", ["config", "created", "state", "state.last_seq"])
def test_an_answer_about_a_stream_that_lacks_a_field_is_an_error_that_names_it(path: str, value: Any) -> None:
    """Regression: it ended as a KeyError, or as a TypeError."""
    run(ensure_stream(answering(STREAM), {"name": "s"}, "Config", {}))
    with pytest.raises(LogUnavailable, match=path.rpartition(".")[2]):
        run(ensure_stream(answering(changed(STREAM, path, value)), {"name": "s"}, "Config", {}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("config", 5),
        ("config", ["a"]),
        ("created", 5),
        ("state", 5),
        ("state", "text"),
        ("state.last_seq", "text"),
        ("state.last_seq", {}),
        ("state.last_seq", 5.5),
        ("error", 5),
    ],
)
def test_an_answer_with_something_else_in_a_field_is_an_error_that_names_it(path: str, value: Any) -> None:
    """Regression: it ended as a TypeError, or an AttributeError."""
    with pytest.raises(LogUnavailable, match=path.rpartition(".")[2]):
        run(ensure_stream(answering(changed(STREAM, path, value)), {"name": "s"}, "Config", {}))


def test_a_consumer_that_too_few_nodes_can_have_is_no_lack_of_storage() -> None:
    """Regression: the same error of a write means that, and so it was told to free a disk, and of `open` as LogFull."""
    refused = {"error": {"code": 503, "err_code": 10023, "description": "insufficient resources"}}
    missing = {"error": {"code": 404, "err_code": 10014, "description": "consumer not found"}}

    async def request(subject: str, *_: Any, **__: Any) -> bytes:
        return json.dumps(missing if ".INFO." in subject else refused).encode()

    connection: Any = SimpleNamespace(request=request, on_connect=lambda _: None)
    with pytest.raises(LogUnavailable, match="too few of its nodes") as caught:
        run(ensure_consumer(NatsStream(connection, "$JS.API", "s", 3), {"durable_name": "c"}, "Config"))
    assert "storage" not in str(caught.value)


@pytest.mark.parametrize("value", [..., None])
def test_an_answer_about_a_consumer_that_lacks_a_field_is_an_error_that_names_it(value: Any) -> None:
    wanted = {"durable_name": "c"}
    run(ensure_consumer(answering(CONSUMER), wanted, "Config"))
    with pytest.raises(LogUnavailable, match="config"):
        run(ensure_consumer(answering(changed(CONSUMER, "config", value)), wanted, "Config"))


@pytest.mark.parametrize("answer", [[], 1, "text", None])
def test_what_is_no_answer_is_an_error_of_ours(answer: Any) -> None:
    with pytest.raises(LogUnavailable):
        run(answering(answer).info())


@pytest.mark.parametrize("answer", [b"[]", b"no JSON", b'{"state": {}}', b'{"state": 5}', b'{"error": 5}'])
def test_a_new_connection_is_not_used_while_the_log_cannot_be_looked_at(answer: bytes) -> None:
    """Regression: it ended as a KeyError, an AttributeError, or an error of the JSON reader."""

    async def request(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(data=answer)

    same = SameLog("s", "withdrawn", False)
    same.note(7)
    client: Any = SimpleNamespace(request=request)
    with pytest.raises(LogUnavailable):
        run(same.look(client, "$JS.API.STREAM.INFO.s", "barrier"))
