"""The parts of nats-py that we replace still exist, and it is reported when they do not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from nats.aio.client import Client

from bufstore import BufstoreError, ConfigError, NatsConfig
from bufstore.jetstream import frames, hooks
from bufstore.jetstream.connection import Connection


def test_the_installed_client_has_all_that_is_replaced() -> None:
    assert hooks.changed() == hooks.concerns() == []


def without(name: str) -> type:
    """A client that lacks the method."""
    methods = {n: v for n, v in vars(Client).items() if n != name}
    return type("Other", (), methods)


class Silent:
    """A client that calls none of its methods."""


@pytest.mark.parametrize(
    "name", ["_process_msg", "_process_headers", "_process_err", "_connect_command", "_flush_pending"]
)
def test_a_method_that_was_renamed_changed_or_is_called_no_more_is_noticed(name: str) -> None:
    assert hooks.changed(without(name)) == [name]

    class Narrow(Client):
        pass

    setattr(Narrow, name, lambda self, other: None)
    assert hooks.changed(Narrow) == [name]
    assert name in hooks.changed(callers=(Silent,))


async def opened(url: str) -> BufstoreError | None:
    connection = Connection(NatsConfig(servers=url, connect_timeout_s=1), "test")
    try:
        await connection.open()
    except BufstoreError as e:
        return e
    finally:
        await connection.aclose()
    return None


async def test_a_version_that_was_not_looked_at_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frames, "supported", False)
    with caplog.at_level(logging.WARNING):
        assert await opened("nats://127.0.0.1:1")
    assert "slower path" in caplog.text
    assert "nats-py 2." in caplog.text


async def test_no_credentials_are_sent_by_a_client_that_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("it connects")

    monkeypatch.setattr(hooks, "changed", lambda: [hooks.GUARD])
    monkeypatch.setattr(Client, "connect", forbidden)
    refused = await opened("tls://u:geheim@127.0.0.1:1")
    assert isinstance(refused, ConfigError)
    assert "over TLS only" in str(refused)
    assert "geheim" not in str(refused)
