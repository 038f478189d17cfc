"""`bufstore spark …`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from conftest import Deployment
from helpers import fresh
from spark.test_crashes import environment
from spark.test_jobs import in_postgres, write


async def spark_cli(deployment: Deployment, *arguments: str) -> tuple[int, dict[str, Any]]:
    where = {
        "BUFSTORE_NATS": deployment.servers.nats.url,
        "BUFSTORE_POSTGRES": deployment.servers.postgres.dsn,
        "BUFSTORE_SCHEMA": deployment.name,
        "BUFSTORE_STREAM": deployment.log.stream,
        "BUFSTORE_BUCKET": deployment.log.bucket,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bufstore.cli", "spark", *arguments, "--master", "local[2,4]", "--json",
        env=environment(**where), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(120):
        out, err = await process.communicate()
    assert out, err.decode()[-2000:]
    assert process.returncode is not None
    return process.returncode, json.loads(out)


async def test_archive_drain_and_a_restore_that_finds_all_there(deployment: Deployment, tmp_path: Path) -> None:
    threads = [fresh() for _ in range(4)]
    await write(deployment, threads, range(3))
    path = str(tmp_path / "archive")
    code, report = await spark_cli(deployment, "archive", path)
    assert (code, report["count"]) == (0, 12)
    code, report = await spark_cli(deployment, "drain", "--tasks", "2")
    assert (code, report["entries"], report["parked"]) == (0, 12, 0)
    assert await in_postgres(deployment, threads) == {t: [0, 1, 2] for t in threads}
    code, report = await spark_cli(deployment, "restore", path, "--dry-run")
    assert (code, report["applied"], report["present"]) == (0, 0, 12)
