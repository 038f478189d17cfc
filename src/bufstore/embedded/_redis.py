"""A Redis server in memory, for tests and benchmarks of code that can use Redis."""

from __future__ import annotations

import socket

from . import _wheels
from ._base import Server, write_private


class RedisServer(Server):
    """One redis-server; its data is gone when it stops.

    `port`: None: the first start chooses a free port, and later starts keep it while it is free.
    """

    _name = "redis-server"

    @property
    def url(self) -> str:
        """Where clients connect, with the password. Raises EmbeddedError before the first start."""
        return self._address(self._password if self._port else "")

    def _address(self, password: str) -> str:
        return f"redis://:{password}@127.0.0.1:{self.port}"

    def _check_programs(self) -> None:
        _wheels.redis_binary()

    def _command(self, port: int) -> list[str]:
        lines = [
            "bind 127.0.0.1",
            f"port {port}",
            f"requirepass {self._password}",
            'save ""',
            "appendonly no",
            "daemonize no",
            "tcp-keepalive 30",
        ]
        write_private(self.data / "redis.conf", "\n".join(lines) + "\n")
        return [str(_wheels.redis_binary()), str(self.data / "redis.conf")]

    def _answers(self, seconds: float) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), min(seconds, 2.0)) as connection:
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                answer = b""
                while b"PONG" not in answer and not answer.startswith(b"-"):
                    part = connection.recv(1000)
                    if not part:
                        return False
                    answer += part
                return b"PONG" in answer
        except OSError:
            return False
