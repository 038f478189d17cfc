"""`bufstore spark …`: jobs that need no program of their own. Needs the `spark` extra."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.operate.spark_quarantine import quarantine
from bufstore.cli.running import EXIT_WRONG, POSITION, Failure, Finite, Time
from bufstore.spark.config import Deployment

_MASTER = click.option(
    "--master",
    default="local[*,4]",
    show_default=True,
    help="Spark's master, or sc://… for Connect. Under spark-submit: the one given there.",
)
_TASKS = click.option("--tasks", type=click.IntRange(min=1), help="Tasks at the same time. Default: Spark's.")


@click.group()
def spark() -> None:
    """Jobs on Spark: drain, archive, make a table of the archive, restore; and rows that a sink has set aside."""


spark.add_command(quarantine)


@spark.command()
@_MASTER
@_TASKS
@click.option(
    "--timeout", type=Finite(min=1), default=3600.0, show_default=True, help="Seconds after which to give up."
)
@connects()
def drain(options: Options, master: str, tasks: int | None, timeout: float) -> None:
    """Flush everything that is in the log now, with the executors as flushers."""
    from bufstore.spark.drain import bulk_drain

    with options.target() as target, _session(master) as session, _bar(options) as on_lag:
        report = bulk_drain(session, _deployment(target), tasks=tasks, timeout_s=timeout, on_lag=on_lag)
    options.answer(report, "drained")


@spark.command()
@click.argument("path")
@_MASTER
@_TASKS
@click.option("--start", type=POSITION, help="Message of the stream to begin at. Default: where the archive ends.")
@connects()
def archive(options: Options, path: str, master: str, tasks: int | None, start: int | None) -> None:
    """Write the part of the log that the archive at PATH lacks, as Parquet."""
    from bufstore.spark.log_archive.archive_job import archive as write

    with options.target() as target, _session(master, progress=not options.as_json) as session:
        report = write(session, _deployment(target), path, start=start, tasks=tasks)
    options.answer(report, "archived")


@spark.command()
@click.argument("path")
@_MASTER
@click.option("--compact", "merging", is_flag=True, help="Merge small neighbouring parts and ranges.")
@click.option("--expire", "before", type=Time(), help="Remove parts whose entries were all stored before this time.")
@click.option(
    "--ranges",
    is_flag=True,
    help="With --expire: also remove ranges whose messages were all stored before it; they can no longer be restored.",
)
@connects()
def table(options: Options, path: str, master: str, merging: bool, before: datetime | None, ranges: bool) -> None:
    """Add the archive's ranges that its table lacks. The table is what people query. PATH is the archive.

    Parts and ranges that were merged into larger ones are removed a day later, by the next run.
    """
    from bufstore.spark.log_archive import tables_job

    if ranges and before is None:
        raise click.UsageError("--ranges needs --expire.")
    with _session(master, progress=not options.as_json) as session:
        report = tables_job.tabulate(session, path)
        if merging:
            merged = tables_job.compact(session, path)
            report.rows, report.parts = report.rows + merged.rows, report.parts + merged.parts
            report.ranges = merged.ranges
        if not master.startswith("sc://"):
            tables_job.expire(session, path, before=before, ranges=ranges)
        elif before is not None:
            raise Failure("Spark Connect cannot remove files: expire an archive from a session with a driver")
    options.answer(report, "in the table")


@spark.command()
@click.argument("path")
@_MASTER
@_TASKS
@click.option("--into", type=click.Choice(["postgres", "log"]), default="postgres", show_default=True)
@click.option("--thread", "threads", metavar="THREAD", multiple=True, help="Only this thread (repeatable).")
@click.option("--until", type=Time(), help="Only what was stored before this time.")
@click.option("--dry-run", is_flag=True, help="Say what would be done.")
@connects()
def restore(
    options: Options,
    path: str,
    master: str,
    tasks: int | None,
    into: Any,
    threads: tuple[str, ...],
    until: datetime | None,
    dry_run: bool,
) -> None:
    """Restore the archive's entries that Postgres or the log lacks. PATH is the archive.

    Writes them into Postgres, while no flusher runs; or into the log, from where flushers move them on.
    """
    from bufstore.spark.log_archive.restore_job import restore as bring_back

    with options.target() as target, _session(master, progress=not options.as_json) as session:
        wanted: dict[str, Any] = {"threads": threads or None, "until": until}
        report = bring_back(session, path, _deployment(target), into=into, tasks=tasks, dry_run=dry_run, **wanted)
    title = "would be restored" if dry_run else "restored"
    options.answer(report, title, code=EXIT_WRONG if report.refused else 0)


def _deployment(target: Endpoints) -> Deployment:
    return Deployment(
        nats=target.nats, postgres=target.postgres, schema=target.schema, stream=target.stream, bucket=target.bucket
    )


@contextmanager
def _session(master: str, *, progress: bool = False) -> Iterator[Any]:
    """Give a Spark session. `progress`: show Spark's own bar of its tasks on standard error."""
    try:
        import pyspark  # noqa: F401
    except ModuleNotFoundError:
        raise Failure("pyspark is not installed: these commands need `pip install 'bufstore[spark,cli]'`") from None
    from bufstore.spark.spark_session import session

    running = session("bufstore", master, **{"spark.ui.showConsoleProgress": str(progress).lower()})
    if not master.startswith("sc://"):
        running.sparkContext.setLogLevel("ERROR")
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def _bar(options: Options) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error that goes from the first lag that is seen to none."""
    columns = (TextColumn("flushed"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=options.as_json) as progress:
        task = progress.add_task("drain", total=None)
        first: list[int] = []

        def on_lag(lag: int) -> None:
            if not first:
                first.append(lag)
            progress.update(task, total=first[0], completed=max(0, first[0] - lag))

        yield on_lag
