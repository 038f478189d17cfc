"""Runs a job in a process of its own: `python -m spark.job_process <job> <settings as JSON>`; prints JSON."""

from __future__ import annotations

import io
import json
import logging
import os
import runpy
import signal
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec

from bufstore import ConfigError
from bufstore.spark import (
    Deployment,
    SinkConfig,
    archive,
    bulk_drain,
    checkpoint_sink,
    compact,
    ensure_java,
    expire,
    restore,
    session,
    tabulate,
)
from bufstore.spark.analytics import entries
from bufstore.spark.sink.row_writer import write_rows
from spark.jobs import frame, read_options_of, rows_of, stream

warnings.simplefilter("ignore")


def killed(settings: dict[str, Any]) -> None:
    """Kill the driver once batch 1 is in the log, before Spark has noted it."""
    write = checkpoint_sink(SinkConfig(**settings["sink"]))

    def write_and_die(df: Any, batch_id: int) -> None:
        write(df, batch_id)
        if batch_id == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    spark = session("killed", "local[2,4]", **settings["spark"])
    stream(spark, Path(settings["input"]), Path(settings["checkpoints"]), write_and_die).awaitTermination(180)


def killed_within(settings: dict[str, Any]) -> None:
    """Kill the driver within batch 1, when one row of its first task is in the log. The task writes no more."""
    from bufstore.spark.sink import foreach_batch

    driver = os.getpid()

    def task_that_stops(config: Any, batch_id: int, *arguments: Any) -> Any:
        import threading

        from bufstore.spark.sink import foreach_batch  # the worker's own module, in which nothing is replaced yet

        parts_of = foreach_batch.parts_of

        def first_row(*arguments: Any) -> Any:
            # A part, here a row, is taken only once all earlier parts are durable.
            yield next(parts_of(*arguments))
            os.kill(driver, signal.SIGKILL)
            threading.Event().wait()

        if batch_id == 1:
            foreach_batch.parts_of = first_row
        yield from foreach_batch._task(config, batch_id, *arguments)

    foreach_batch._task = task_that_stops
    write = checkpoint_sink(SinkConfig(**settings["sink"], tasks=2, in_flight_bytes=1))
    # One core, so that the second task begins when the first has ended.
    spark = session("killed", "local[1,4]", **settings["spark"])
    stream(spark, Path(settings["input"]), Path(settings["checkpoints"]), write).awaitTermination(180)


def connect(settings: dict[str, Any]) -> None:
    """Run the sink, the source and the writer through Spark Connect."""
    from pyspark.sql import SparkSession

    ensure_java()
    builder = SparkSession.builder.remote("local[2]")
    for name, value in settings["spark"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    write = checkpoint_sink(SinkConfig(**settings["sink"]))
    for _ in range(2):
        query = stream(spark, Path(settings["input"]), Path(settings["checkpoints"]), write)
        assert query.awaitTermination(180)
        commits = Path(settings["checkpoints"]) / "commits"
        (commits / "1").unlink()
        (commits / ".1.crc").unlink(missing_ok=True)
    refused = ""
    try:
        other = stream(spark, Path(settings["input"]), Path(settings["checkpoints"] + "-other"), write)
        other.awaitTermination(180)
    except Exception as e:
        refused = str(e)
    found = spark.read.format("threadlog").options(**read_options_of(settings["sink"])).load()
    print(json.dumps({"entries": found.count(), "refused": "app id of its own" in refused} | _jobs(spark, settings)))


def _jobs(spark: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Run all jobs, one after the other, and return their results."""
    where, path = Deployment(**{k: v for k, v in settings["sink"].items() if k != "app_id"}), settings["archive"]
    done: dict[str, Any] = {"archived": archive(spark, where, path).count > 0, "rows": tabulate(spark, path).rows}
    done["both"] = entries(spark, path, where).count()
    done["drained"] = bulk_drain(spark, where, tasks=2).entries
    options = read_options_of(settings["sink"]) | {"postgresUrl": where.postgres, "schema": where.schema}
    done["messages"] = spark.read.format("bufstore").options(**options, table="messages").load().count()
    done["present"] = restore(spark, path, where, dry_run=True).present
    done["merged"] = compact(spark, path).parts
    try:
        expire(spark, path)
    except ConfigError as e:
        done["expire"] = str(e)
    return done


def speculating(settings: dict[str, Any]) -> None:
    """Slow down the first attempt of one task of a sink, so that Spark starts a copy of it on another host."""
    spark = session("speculating", settings["master"], **settings["spark"])
    write = checkpoint_sink(SinkConfig(**settings["sink"]))
    slow = settings["slow"]

    def slowed(batches: Any) -> Any:
        import time

        from pyspark import TaskContext

        context = TaskContext.get()
        yield from batches
        if context.partitionId() == 0:
            Path(f"{slow}-{context.attemptNumber()}").touch()
            if context.attemptNumber() == 0:
                for _ in range(1200):  # until the copy has written everything, too
                    if Path(f"{slow}-1").exists():
                        break
                    time.sleep(0.1)

    from bufstore.spark.sink import foreach_batch

    task = foreach_batch._task

    def slow_task(*arguments: Any) -> Any:
        # Slowed only after its writes, so that both attempts have written everything.
        yield from slowed(task(*arguments))

    foreach_batch._task = slow_task
    write(frame(spark, rows_of(settings["threads"], range(5))), 0)
    print(json.dumps({"attempts": [n for n in range(4) if Path(f"{slow}-{n}").exists()]}))
    spark.stop()


def submitted(settings: dict[str, Any]) -> None:
    """Run the sink under `spark-submit`, on the cluster that the command names."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()
    checkpoint_sink(SinkConfig(**settings["sink"], tasks=2))(frame(spark, rows_of(settings["threads"], range(3))), 0)
    spark.stop()


def rows(settings: dict[str, Any]) -> None:
    """Write a task's rows in a worker process that knows no thread yet. Creates a file once it waits."""

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waits, and fails in" in record.getMessage():
                Path(settings["told"]).touch()

    logging.getLogger("bufstore.spark").addHandler(Told())
    found = write_rows(SinkConfig(**settings["sink"]), settings["batch"], [settings["rows"]])
    print(json.dumps(msgspec.to_builtins(found.counts)))


def sql(settings: dict[str, Any]) -> None:
    """Run statements in a session whose servers come from the environment, and print their rows."""
    spark = session("sql", "local[2]", **settings["spark"])
    print(json.dumps({"rows": [[list(row) for row in spark.sql(s).collect()] for s in settings["statements"]]}))
    spark.stop()


def programs(settings: dict[str, Any]) -> None:
    """Run programs one after the other in one JVM, each with its own session; print exit codes and output."""
    found = []
    for name, *arguments in settings["programs"]:
        sys.argv = [name, *arguments]
        printed, code = io.TextIOWrapper(io.BytesIO(), "utf-8"), 0
        try:
            with redirect_stdout(printed):
                if name.endswith(".py"):
                    runpy.run_path(name, run_name="__main__")
                else:
                    runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as e:
            code = int(e.code or 0)
        printed.seek(0)
        found.append((code, printed.read()))
    spark = session("java", "local[1]")
    home = spark.sparkContext._jvm.java.lang.System.getProperty("java.home")
    print(json.dumps({"programs": found, "home": home, "JAVA_HOME": os.environ["JAVA_HOME"]}))
    spark.stop()


if __name__ == "__main__":
    jobs = (killed, killed_within, connect, speculating, programs, rows, sql)
    {found.__name__: found for found in jobs}[sys.argv[1]](json.loads(sys.argv[2]))
