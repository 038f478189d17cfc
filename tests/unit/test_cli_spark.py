"""What `bufstore spark` reports of its jobs; the jobs themselves are tested on Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.errors import PySparkValueError, PythonException

from bufstore.cli.app import app as command_line
from bufstore.cli.operate import spark
from bufstore.errors import ConfigError
from bufstore.spark import TablesReport
from bufstore.spark import drain as drain_job
from bufstore.spark.config import Deployment
from bufstore.spark.log_archive import archive_job, restore_job, tables_job
from bufstore.tls_files import TlsFiles
from integration.test_cli_environments import Certificates


@contextmanager
def no_session(master: str, *, progress: bool = False) -> Iterator[None]:
    yield


@pytest.mark.parametrize(("compact", "written"), [(False, (5, 1, 0)), (True, (12, 3, 4))])
def test_the_report_of_a_table_has_what_was_merged(
    monkeypatch: pytest.MonkeyPatch, compact: bool, written: tuple[int, int, int]
) -> None:
    made: dict[str, Any] = {
        "tabulate": TablesReport(end=9, rows=5, parts=1),
        "compact": TablesReport(end=9, rows=7, parts=2, ranges=4),
        "expire": 0,
    }
    for job, report in made.items():
        monkeypatch.setattr(tables_job, job, lambda *_, report=report, **__: report)
    monkeypatch.setattr(spark, "_session", no_session)
    options = ["--compact"] if compact else []
    ran = CliRunner().invoke(command_line, ["spark", "table", "/archive", "--json", *options])
    assert ran.exit_code == 0, ran.output
    said = json.loads(ran.stdout)
    assert (said["end"], said["rows"], said["parts"], said["ranges"]) == (9, *written)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied", "/archive"), PySparkValueError("no\nsuch")])
def test_what_spark_or_a_file_system_refuses_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Regression: it ended with a traceback, nothing for --json, and the exit code for something that is lost."""

    def refused(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(tables_job, "tabulate", refused)
    monkeypatch.setattr(spark, "_session", no_session)
    ran = CliRunner().invoke(command_line, ["spark", "table", "/archive", "--json"])
    said = json.loads(ran.stdout)
    assert (ran.exit_code, said["code"], said["error"]) == (2, 2, type(error).__name__)
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [("drain",), ("archive", "/archive"), ("restore", "/archive")])
def test_files_for_tls_go_to_the_executors_by_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Regression: a CA of one's own was refused once Spark had started, for the command had made a context of it."""
    given: list[Any] = []

    @contextmanager
    def started(master: str, *, progress: bool = False) -> Iterator[None]:
        given.append(master)
        yield

    def ran(*arguments: Any, **_: Any) -> None:
        given.extend(a for a in arguments if isinstance(a, Deployment))
        raise ConfigError("it is only looked at how the job is called")

    for module, job in ((drain_job, "bulk_drain"), (archive_job, "archive"), (restore_job, "restore")):
        monkeypatch.setattr(module, job, ran)
    monkeypatch.setattr(spark, "_session", started)
    files = Certificates(tmp_path)
    where = ("--nats", "tls://h", "--postgres", "dbname=x", "--json")
    ours = ("--tls-ca", files.ca, "--tls-cert", files.client_cert, "--tls-key", files.client_key)
    CliRunner().invoke(command_line, ["spark", *command, *where, *map(str, ours)])
    _, deployment = given
    assert deployment.server.tls == TlsFiles(ca=files.ca, certificate=files.client_cert, key=files.client_key)
    given.clear()
    wrong = CliRunner().invoke(command_line, ["spark", *command, *where, "--tls-cert", str(files.ca)])
    assert (wrong.exit_code, json.loads(wrong.stdout)["error"], given) == (2, "ConfigError", [])


def test_of_an_error_of_ours_in_sparks_its_own_words_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it said AnalysisException, and that a traceback follows."""
    inner = 'Traceback (most recent call last):\n  File "x.py"\nbufstore.errors.DataLoss: the log begins at 5\n\tat org'

    def lost(*_: Any, **__: Any) -> None:
        raise PySparkValueError(f"[PYTHON_DATA_SOURCE_ERROR] Failed to generate partitions: {inner}")

    monkeypatch.setattr(tables_job, "tabulate", lost)
    monkeypatch.setattr(spark, "_session", no_session)
    ran = CliRunner().invoke(command_line, ["spark", "table", "/archive", "--json"])
    assert (json.loads(ran.stdout)["error"], ran.stderr) == ("DataLoss", "Error: the log begins at 5\n")


_WORKER = (
    "Traceback (most recent call last):\n"
    '  File "/app/reading.py", line 7, in read\n'
    "    return open(path)\n"
    "           ^^^^^^^^^^\n"
    "FileNotFoundError: no such file: /mnt/x\n"
)
_JAVA = (
    "An error occurred while calling o128.collectToPython.\n"
    ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 2.0 failed 1 times\n"
    "\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:4568)\n"
    "Caused by: "
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"An exception was thrown from the Python worker:\n{_WORKER}", "FileNotFoundError: no such file: /mnt/x"),
        (
            f"{_JAVA}org.apache.spark.api.python.PythonException: {_WORKER}\n\tat org.apache.spark.X.y(X.scala:1)\n",
            "FileNotFoundError: no such file: /mnt/x",
        ),
        (f"{_JAVA}java.io.EOFException\n\tat java.io.X.y(X.java:1)\n", "java.io.EOFException"),
    ],
)
def test_of_an_error_of_a_worker_its_own_last_line_is_told(
    monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    """Regression: of what was none of our errors, only that a worker of Python had raised something was told."""

    def failed(*_: Any, **__: Any) -> None:
        raise PythonException(text)

    monkeypatch.setattr(tables_job, "tabulate", failed)
    monkeypatch.setattr(spark, "_session", no_session)
    ran = CliRunner().invoke(command_line, ["spark", "table", "/archive", "--json"])
    assert ran.stderr == f"Error: PythonException: {told}\n"
