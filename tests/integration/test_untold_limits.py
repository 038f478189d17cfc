"""Limits of the server's that it does not tell its clients."""

from __future__ import annotations

import asyncio

import pytest

from bufstore import Consistency
from bufstore.embedded import Servers
from conftest import Deployment
from helpers import run_of, said

#: With servers of their own.
pytestmark = pytest.mark.alone

ACCOUNT = "users: [{user: a, password: p}], jetstream: enabled, limits {max_payload: 65536}"


@pytest.mark.parametrize("size", [1 << 10, 3 << 20], ids=["many", "in parts"])
async def test_a_max_payload_of_the_account_stops_no_write(size: int, caplog: pytest.LogCaptureFixture) -> None:
    """The server tells its clients its own, and ends the connection that sends what is too large for the account."""
    with Servers(nats_config=f"accounts {{ A {{ {ACCOUNT} }} }}\n") as servers:
        async with Deployment(servers).store(nats=f"nats://a:p@127.0.0.1:{servers.nats.port}") as store:
            threads = [f"t{number}" for number in range(300 if size < 65536 else 1)]
            await asyncio.gather(*(store.checkpoint(t, [said(0, size)], run_of(t)) for t in threads))
            await store.checkpoint("t0", [said(0, size), said(1)], run_of("t0"))
            await store.force_flush_all()
            for thread_id in threads:
                more = [said(1)] if thread_id == "t0" else []
                found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
                assert found == [said(0, size), *more]
        assert 1 <= [getattr(r, "action", "") for r in caplog.records].count("nats_lost") <= 6
