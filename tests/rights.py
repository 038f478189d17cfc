"""A NATS server with a user whose permissions change while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import nats

from bufstore.embedded import NatsServer
from helpers import eventually

_USERS = """
authorization {{ timeout: 10, users: [
    {{ user: bufstore, password: {password} }}
    {{ user: app, password: x, permissions: {{ publish: {{ deny: {deny} }} }} }}
] }}
"""


class Rights:
    """The server and its user; see `guarded`."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self._password = server.url.partition("bufstore:")[2].partition("@")[0]
        self.url = f"nats://app:x@127.0.0.1:{server.port}"
        self._write([])

    def _write(self, deny: list[str]) -> None:
        self.server.extra_config = _USERS.format(password=json.dumps(self._password), deny=json.dumps(deny))

    async def deny(self, *subjects: str) -> None:
        """Allow the user to publish everywhere except on these subjects; returns once the server applies it."""
        self._write([*subjects])
        self.server._command(self.server.port)  # writes the configuration file
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGHUP)

        async def reloaded() -> bool:
            client = await nats.connect(self.url)
            try:
                told = json.loads((await client.request("$SYS.REQ.USER.INFO", timeout=5)).data)
            finally:
                await client.close()
            permissions = told["data"].get("permissions") or {}
            return set(permissions.get("publish", {}).get("deny") or []) == set(subjects)

        await eventually(reloaded)


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[Rights]:
    """Start a server of the test's own. Its owner may do everything; `Rights.url` is the restricted user's address."""
    server = NatsServer(folder)
    server.start()
    rights = Rights(server)
    server.stop()
    server.start()
    yield rights
    server.stop()
