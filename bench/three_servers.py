"""Three nats-servers of one JetStream cluster, for tests and benchmarks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from bufstore.embedded import NatsServer
from bufstore.embedded._base import USER, _port_is_free, make_folder

_NODES = 3
# These do not overlap the ports that servers choose themselves, and also lie below those of outgoing connections.
_PORTS = range(10_000, 15_000)
_PARTS = 50
#: The ports that this process was given; on some of them nobody listens yet.
_given: set[int] = set()


@contextmanager
def three_servers(
    folder: Path, more_users: str = "", *, sync_interval: str = "always", monitors: Sequence[int] = ()
) -> Iterator[list[NatsServer]]:
    """Run servers n0 to n2 below `folder` inside the block; they may not have elected a leader yet.

    Each has a user of its own (that of its `url`). All of them also know the user "all" with the password "all", and
    `more_users`, in the form of nats-server's configuration. `monitors`: the ports of their HTTP endpoints.
    Raises EmbeddedError, as `NatsServer.start` does.
    """
    ports = free_ports(_NODES)
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    servers = []
    for i, port in enumerate(ports):
        server = NatsServer(folder / f"n{i}", sync_interval=sync_interval)
        make_folder(server.data)
        server.extra_config = (
            f'server_name: n{i}\ncluster {{ name: c, listen: "127.0.0.1:{port}", routes: [{routes}] }}\n'
            f'authorization {{ timeout: 10, users: [ {{ user: {USER}, password: "{server._password}" }}, '
            f"{{ user: all, password: all }}\n{more_users} ] }}\n"
        )
        if monitors:
            server.extra_config += f'http: "127.0.0.1:{monitors[i]}"\n'
        servers.append(server)
    try:
        with ThreadPoolExecutor(_NODES) as pool:
            list(pool.map(NatsServer.start, servers))
        yield servers
    finally:
        for server in servers:
            server.stop()


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 on which nobody listens now, for servers that keep their ports when they restart.

    No call returns a port that an earlier one has. Each process first tries its own part of the range, so that it takes
    no port of another process's stopped server.
    """
    chance, begin = secrets.SystemRandom(), os.getpid() % _PARTS * (len(_PORTS) // _PARTS)
    ours = _PORTS[begin : begin + len(_PORTS) // _PARTS]
    ports = chance.sample(ours, len(ours)) + chance.sample(_PORTS, 500)
    found = list(islice(filter(_port_is_free, (p for p in dict.fromkeys(ports) if p not in _given)), count))
    _given.update(found)
    return found
