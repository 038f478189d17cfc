"""JetStream that is switched off while processes run: on the server, or for their account."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bufstore import Consistency, ReadNotFresh
from bufstore.embedded import NatsServer, Servers
from bufstore.embedded._wheels import nats_binary
from conftest import Deployment
from helpers import eventually, flush_all, healthy, run_of, said

#: These tests run servers of their own.
pytestmark = pytest.mark.alone


@pytest.fixture
def account_servers() -> Iterator[Servers]:
    with Servers(nats_config=_account("jetstream: enabled")) as servers:
        yield servers


def _account(jetstream: str) -> str:
    return f"accounts {{ A {{ users: [{{user: a, password: p}}], {jetstream} }} }}\n"


def _reload(server: NatsServer, config: str) -> None:
    server.extra_config = config
    server._command(server.port)  # writes the configuration file
    assert server.pid is not None
    os.kill(server.pid, signal.SIGHUP)


async def test_reads_say_that_jetstream_was_switched_off_for_the_account(account_servers: Servers) -> None:
    deployment, server = Deployment(account_servers), account_servers.nats
    async with deployment.store(nats=f"nats://a:p@127.0.0.1:{server.port}") as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        await store.force_flush_all()
        _reload(server, _account("jetstream: disabled"))

        async def said_so() -> bool:
            try:
                await store.load_messages("t", consistency=Consistency.STRONG)
            except ReadNotFresh as e:
                return "JetStream is not enabled for the account" in str(e)
            return False

        await eventually(said_so)
        _reload(server, _account("jetstream: enabled"))
        await healthy(store)
        await store.checkpoint("t", [said(0), said(1)], run_of("t"))
        await flush_all(store)


async def test_who_connects_again_says_that_jetstream_is_switched_off_on_the_server(
    own_servers: Servers, tmp_path: Path
) -> None:
    server = own_servers.nats
    async with Deployment(own_servers).store() as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        server.stop()
        login = f"{{ user: bufstore, password: {json.dumps(server.url.split(':')[2].partition('@')[0])} }}"
        file = tmp_path / "without.conf"
        file.write_text(f'listen: "127.0.0.1:{server.port}"\nauthorization {{ users: [ {login} ] }}\n')
        other = await asyncio.create_subprocess_exec(nats_binary(), "-c", file, stderr=asyncio.subprocess.DEVNULL)
        try:

            async def said_so() -> bool:
                return "JetStream does not answer on this server: it is switched off" in (await store.health()).log

            await eventually(said_so)
        finally:
            other.terminate()
            await other.wait()
        server.start()
        await healthy(store)
        await flush_all(store)
