"""Which server is asked whether it is the primary, and what is told when none is."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from bufstore.postgres.connection.primary import failure, may_be_misjudged, to_the_primary

_FAILED = "connection failed: server is in hot standby mode"
_REFUSED = 'connection failed: FATAL:  password authentication failed for user "u"'
_AWAY = "server login has been failing, try again later (server_login_retry)"


def _attempt(port: int) -> dict[str, Any]:
    return {"host": "h", "port": port, "hostaddr": "127.0.0.1"}


@pytest.mark.parametrize(
    ("failed", "unclear", "told"),
    [
        (_FAILED, [], _FAILED),
        (_FAILED, [_AWAY], f"connection failed: {_AWAY}"),
        (_FAILED, ["permission denied", _AWAY], f"connection failed: {_AWAY}"),
        (_FAILED, ["permission denied"], _FAILED),
        (_REFUSED, [_AWAY], _REFUSED),
    ],
)
def test_what_is_told_when_no_primary_is_found(failed: str, unclear: list[str], told: str) -> None:
    assert failure(failed, unclear) == told


def test_a_server_that_did_not_answer_is_not_tried_twice() -> None:
    text = (
        "server is in hot standby mode\nMultiple connection attempts failed. All failures were:\n"
        "- host: 'h', port: 1, hostaddr: '127.0.0.1': connection timeout expired\n"
        "- host: 'h', port: 2, hostaddr: '127.0.0.1': connection failed: server is in hot standby mode"
    )
    assert [may_be_misjudged(text, _attempt(port)) for port in (1, 2, 3)] == [False, True, True]
    assert may_be_misjudged(_FAILED, _attempt(1))


async def test_each_address_of_a_name_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """libpq would stop at the first address that lets it in."""
    addresses = ["127.0.0.1", "127.0.0.2"]

    async def resolved(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 1)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    asked = []

    async def connect(conninfo: str) -> psycopg.AsyncConnection[Any]:
        asked.append(conninfo_to_dict(conninfo))
        raise psycopg.OperationalError(_FAILED)

    with pytest.raises(psycopg.OperationalError, match="hot standby"):
        await to_the_primary(connect, "host=db.invalid target_session_attrs=primary", False)
    found = [(one.get("hostaddr"), one["target_session_attrs"]) for one in asked]
    assert found == [(None, "primary"), *((address, "any") for address in addresses)]
