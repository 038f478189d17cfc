"""The example in docs/ runs as it is, and draws."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from conftest import Deployment
from helpers import fresh
from spark.test_crashes import environment
from spark.test_threadlog_format import written

_SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "log_analytics.py"


async def test_the_example_draws_what_is_in_a_log(deployment: Deployment, tmp_path: Path) -> None:
    await written(deployment, [fresh() for _ in range(4)], range(5))
    process = await asyncio.create_subprocess_exec(
        sys.executable, _SCRIPT, deployment.servers.nats.url, tmp_path, deployment.log.stream,
        env=environment(MPLBACKEND="Agg"), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(120):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-2000:]
    assert "20 entries" in out.decode()
    for name in ("activity", "threads", "coalescing"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
