"""The servers of a run: embedded ones, with a check of their durability.

Ours and the baselines use the same servers with the same promise: what is acknowledged is on the disk. The running
servers are asked, whatever they were configured with.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from contextlib import ExitStack
from typing import Any

import psycopg

from bench.baselines.raw_nats import RawNats
from bench.three_servers import free_ports
from bufstore.embedded import NatsServer, Servers


class NotDurable(Exception):
    """A server does not sync what it acknowledges, so the figures would compare different promises."""


class BenchServers:
    """Postgres, NATS with ``sync_interval: always``, and a second NATS with the server's default; a context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._ports = free_ports(2)

    def __enter__(self) -> BenchServers:
        always, lazy = self._ports
        servers = self._stack.enter_context(Servers(nats_config=f'http: "127.0.0.1:{always}"'))
        second = NatsServer(servers.data / "lazy", sync_interval="2m", extra_config=f'http: "127.0.0.1:{lazy}"')
        second.temporary = True
        second.start()
        self._stack.callback(second.stop)
        self.nats, self.lazy_nats, self.dsn = servers.nats.url, second.url, servers.postgres.dsn
        self._processes = servers.nats.pid, second.pid, servers.postgres.pid
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def pids(self, *, lazy: bool = False) -> dict[str, list[int]]:
        """Return the process ids of "nats" (`lazy`: of the second one) and "postgres"."""
        always, second, postgres = self._processes
        assert always and second and postgres, "all are running"
        return {"nats": [second if lazy else always], "postgres": [postgres]}

    def durability(self) -> dict[str, Any]:
        """Return how the servers sync. Raises NotDurable unless they sync as the table says."""
        always, lazy = (_jetstream(port) for port in self._ports)
        found: dict[str, Any] = {
            "nats": "sync_interval: always" if always.get("sync_always") else "lazy",
            "lazy_nats": "always" if lazy.get("sync_always") else f"every {lazy.get('sync_interval', 0) // 10**9} s",
        }
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for name in ("fsync", "synchronous_commit", "full_page_writes", "wal_sync_method"):
                found[name] = str(connection.execute(f"SHOW {name}").fetchone()[0])  # type: ignore[index]
        on = all(found[name] == "on" for name in ("fsync", "synchronous_commit", "full_page_writes"))
        if not (always.get("sync_always") and on) or lazy.get("sync_always"):
            raise NotDurable(str(found))
        return found

    def versions(self) -> dict[str, str]:
        """Return the servers' versions."""
        with psycopg.connect(self.dsn) as connection:
            postgres = connection.info.parameter_status("server_version") or "?"
        return {"nats-server": str(_varz(self._ports[0])["version"]), "postgres": postgres}

    def clear(self, keep: str) -> None:
        """Remove all streams, schemas and tables, except those whose name ends with `keep`."""
        for url in (self.nats, self.lazy_nats):
            asyncio.run(_delete_streams(url, keep))
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            schemas = "SELECT nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema|public)'"
            for (name,) in connection.execute(schemas).fetchall():
                if not name.endswith(keep):
                    connection.execute(f'DROP SCHEMA "{name}" CASCADE')
            for (name,) in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall():
                connection.execute(f'DROP TABLE "{name}"')


async def _delete_streams(url: str, keep: str) -> None:
    nats = await RawNats.connect(url)
    names = (await nats.request("$JS.API.STREAM.NAMES"))["streams"] or ()
    for name in names:
        if not name.endswith(keep):
            await nats.request(f"$JS.API.STREAM.DELETE.{name}")
    nats.close()


def _varz(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/varz", timeout=5) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _jetstream(port: int) -> dict[str, Any]:
    config: dict[str, Any] = _varz(port)["jetstream"]["config"]
    return config


def syncs_always(port: int) -> bool:
    """True when the server with this HTTP port syncs everything before it acknowledges."""
    return bool(_jetstream(port).get("sync_always"))
