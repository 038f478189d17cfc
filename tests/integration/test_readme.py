"""The code of README, OWN_STORE and SPARK that starts its own servers, and of OPERATIONS, runs as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bufstore import BufferedThreadStore, ThreadChange
from bufstore.embedded import Servers
from bufstore.testing import APPLY_CHECKS, CHECKS, Applier, Capability
from conftest import Deployment
from helpers import JAVA_OPTIONS, run_of, said

_ROOT = Path(__file__).parent.parent.parent
_TEXT = "\n".join((_ROOT / name).read_text() for name in ("README.md", "docs/OWN_STORE.md", "docs/SPARK.md"))
_BLOCKS = [b for b in re.findall(r"^```python\n(.*?)^```$", _TEXT, re.DOTALL | re.MULTILINE) if "with Servers()" in b]
_SAYS = ["Where is my bag?", "20 messages in my own table", "5 threads, 100 checkpoints"]


#: The example of Spark starts a Java of its own.
_MARKS = [(), (), pytest.mark.long]


@pytest.mark.parametrize(
    ("code", "says"),
    [pytest.param(*block, marks=marks) for *block, marks in zip(_BLOCKS, _SAYS, _MARKS, strict=True)],
    ids=["first", "own-store", "spark"],
)
def test_the_code_runs(code: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(code)
    command, env = [sys.executable, "-W", "error", str(file)], os.environ | {"JDK_JAVA_OPTIONS": JAVA_OPTIONS}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


async def test_the_store_of_own_store_passes_the_suite_that_it_names(own_servers: Servers) -> None:
    names: dict[str, Any] = {}
    exec(next(b for b in _BLOCKS if "class MyStore" in b).partition("\nwith Servers()")[0], names)
    dsn, can = own_servers.postgres.dsn, {Capability.MESSAGE_PAGES}
    mine = names["MyStore"](dsn)
    await mine.create_tables()
    async with await BufferedThreadStore.open(mine, nats=own_servers.nats.url, postgres=dsn) as store:
        for check in CHECKS:
            if check.needs <= can:
                await check(store)
                await store.force_flush_all()

    async def apply(batch: Sequence[ThreadChange]) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            await mine.apply(connection, batch)

    for check_apply in APPLY_CHECKS:
        if check_apply.needs <= can:
            await check_apply(Applier(mine, apply))


async def test_the_gauges_of_operations_are_numbers(deployment: Deployment) -> None:
    text = (_ROOT / "docs" / "OPERATIONS.md").read_text()
    code = next(b for b in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if "def gauges" in b)
    names: dict[str, Any] = {"BufferedThreadStore": BufferedThreadStore}
    exec(code, names)
    async with deployment.store() as store:
        await store.checkpoint_append("t", [said(1)], run_of("t"))
        await store.force_flush("t")
        found = await names["gauges"](store)
    assert all(type(value) is float for value in found.values()), found
    assert found["appended"] == found["flusher_entries"] == 1
    assert found["flusher_running"] == 1 and found["quarantined"] == 0
    assert found["log_bytes_max"] > 0 and "lag" in found
