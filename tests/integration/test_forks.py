"""A forked process that goes on with its parent's event loop does not disturb the parent's connections."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

from bufstore.embedded import Servers
from helpers import query

_SCRIPT = Path(__file__).parent.parent / "forking_process.py"


def test_a_fork_is_refused_each_call_and_shares_no_connection_with_its_parent(servers: Servers) -> None:
    name = f"f{secrets.token_hex(5)}"
    ended = subprocess.run(
        [sys.executable, str(_SCRIPT), servers.nats.url, servers.postgres.dsn, name],
        capture_output=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    told = json.loads(ended.stdout)
    refused = "ConfigError: a store cannot be used after a fork: open one in each process"
    assert told["calls"] == dict.fromkeys(told["calls"], refused)
    assert told["later"] == dict.fromkeys(told["calls"], refused), "whatever has become of the parent's tasks"
    assert told["shared"] == []
    assert set(told["closed"]) == {"done"}
    assert told["own"] == [1], "it may open one of its own"
    assert told["exit"] == 0
    assert told["kept"], "the parent has the connections that it had"
    assert told["losses"] == []
    rows = asyncio.run(query(servers.postgres.dsn, f"SELECT thread_id FROM {name}.threads"))
    assert {row[0] for row in rows} == {"before", "own", *told["acknowledged"]}
