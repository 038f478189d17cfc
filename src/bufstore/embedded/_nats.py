"""nats-server with JetStream."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from bufstore.errors import EmbeddedError

from . import _wheels
from ._base import USER, Server, write_private


class NatsServer(Server):
    """One nats-server with JetStream in files below `data`.

    `sync_interval` is nats-server's: "always" (fsync before every acknowledgement) or a duration like "2m".
    `extra_config` is appended to the configuration file; a block that it repeats (`jetstream`, `authorization`)
    replaces the one written here, and must still admit the user of `url`.
    `port`: None: the first start chooses a free port, and later starts keep it while it is free.
    """

    _name = "nats-server"

    def __init__(
        self, data: Path, *, sync_interval: str = "always", port: int | None = None, extra_config: str = ""
    ) -> None:
        super().__init__(data, port=port)
        self.sync_interval = sync_interval
        self.extra_config = extra_config

    @property
    def url(self) -> str:
        """Where clients connect, with user and password. Raises EmbeddedError before the first start."""
        return self._address(self._password if self._port else "")

    def _address(self, password: str) -> str:
        return f"nats://{USER}:{password}@127.0.0.1:{self.port}"

    def _check_programs(self) -> None:
        _wheels.nats_binary()

    def _command(self, port: int) -> list[str]:
        def quoted(value: object) -> str:
            return json.dumps(str(value), ensure_ascii=False)

        lines = [
            f'listen: "127.0.0.1:{port}"',
            # A list of users, because a single one excludes the `accounts` that may follow.
            # The server's own two seconds for a login would refuse whoever connects while the machine stands still.
            f"authorization {{ timeout: 10, users: [ {{ user: {USER}, password: {quoted(self._password)} }} ] }}",
            f"jetstream {{ store_dir: {quoted(self.data)}, sync_interval: {quoted(self.sync_interval)} }}",
            self.extra_config,
        ]
        write_private(self.data / "nats.conf", "\n".join(lines) + "\n")
        return [str(_wheels.nats_binary()), "-c", str(self.data / "nats.conf")]

    def _answers(self, seconds: float) -> bool:
        """Log in and ask JetStream for the account's state; any reply shows that JetStream answers requests."""
        try:
            address = ("127.0.0.1", self.port)
            with (
                socket.create_connection(address, min(seconds, 2.0)) as connection,
                connection.makefile("rb") as stream,
            ):
                info = json.loads(stream.readline().removeprefix(b"INFO ") or b"{}")
                login = {"user": USER, "pass": self._password, "verbose": False, "pedantic": False,
                         "headers": True, "no_responders": True}  # fmt: skip
                ask = b"SUB _INBOX.start 1\r\nPUB $JS.API.INFO _INBOX.start 0\r\n\r\nPING\r\n"
                connection.sendall(b"CONNECT " + json.dumps(login).encode() + b"\r\n" + ask)
                # In a cluster, JetStream answers only once the other members are up.
                sign = (b"PONG",) if "cluster" in info else (b"MSG", b"HMSG")
                for line in iter(stream.readline, b""):
                    if line.startswith(b"-ERR"):
                        raise EmbeddedError(f"{self._name} refused the connection: {line.decode().strip()}")
                    if line.startswith(sign):
                        return bool(info.get("jetstream"))
        except (OSError, ValueError):
            pass
        return False
