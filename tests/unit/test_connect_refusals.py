"""What a server, or a pooler in front of it, says to who cannot connect: is it an outage?"""

from __future__ import annotations

import pytest

from bufstore.postgres.connection.refusals import is_refusal, reason_in

_FAILED = 'connection failed: connection to server at "127.0.0.1", port 6432 failed: FATAL:  '


@pytest.mark.parametrize(
    "words",
    ["SSL required", "login rejected", "no authentication method is found", "no such user"],
)
def test_what_pgbouncer_refuses_for_good_is_no_outage(words: str) -> None:
    assert is_refusal(reason_in(_FAILED + words))


@pytest.mark.parametrize(
    "words",
    [
        "no more connections allowed (max_client_conn)",
        "client connections exceeded (max_db_client_connections)",
        "server login has been failing, cached error: the database system is starting up (server_login_retry)",
        "server login has been failing, try again later (server_login_retry)",
        'database "postgres" is disabled',
        "bouncer config error",  # in an `auth_query`, when Postgres restarts
        "query_wait_timeout",
        "client_login_timeout (server down)",
        "pooler is shutting down",
    ],
)
def test_what_passes_behind_pgbouncer_is_an_outage(words: str) -> None:
    assert not is_refusal(reason_in(_FAILED + words))
