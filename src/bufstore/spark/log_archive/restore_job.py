"""Brings an archive back, thread by thread: into Postgres or into a log.

In Postgres, the entries keep their positions, and a thread's row says up to which position they are applied. So you may
repeat a restore, or stop it and continue later, and what Postgres already has stays as it is. For a restore into a log,
see `bufstore.spark.log_archive.into_log`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial, reduce
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from bufstore.buffer.entry import Item
from bufstore.buffer.subjects import Subjects, first_sequence
from bufstore.buffer.target import check_kind
from bufstore.config import LogConfig
from bufstore.errors import ConfigError, NoLog
from bufstore.nats.ranges import LogState
from bufstore.spark.config import Deployment
from bufstore.spark.job_description import described
from bufstore.spark.log_archive.applicable import RestoreCounts
from bufstore.spark.log_archive.archive_job import check_domain, log_of
from bufstore.spark.log_archive.archived_entries import pieces_of, threads_of
from bufstore.spark.log_archive.archived_lane import archived_log
from bufstore.spark.log_archive.into_log import IntoLog
from bufstore.spark.log_archive.into_postgres import IntoPostgres
from bufstore.spark.log_archive.large_threads import without_given_up_one_by_one
from bufstore.spark.log_archive.manifests import Manifest, check_numbers, check_ranges, manifests_of, whole
from bufstore.spark.log_archive.portions import portions
from bufstore.spark.process_loop import loop
from bufstore.spark.task import outcomes
from bufstore.spark.worker_errors import of_servers
from bufstore.threads.postgres.store import PostgresThreadStore
from bufstore.threads.protocol import kind_of
from bufstore.types import check_choice, check_id, check_ids

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

Into = Literal["postgres", "log"]
_OTHER_STORE = (
    "A restore into Postgres writes bufstore's own tables. Restore into the log (into='log'): a process that has the "
    "store flushes it from there."
)


class RestoreReport(RestoreCounts, kw_only=True):
    """What a restore did, or (``dry_run``) would do."""

    dry_run: bool = False
    #: How many of the named threads have no entry in the archive (before ``until``).
    missing: int = 0
    seconds: float = 0.0


def restore(
    spark: SparkSession,
    path: str,
    deployment: Deployment,
    *,
    into: Into = "postgres",
    threads: Sequence[str] | None = None,
    until: datetime | None = None,
    tasks: int | None = None,
    dry_run: bool = False,
) -> RestoreReport:
    """Bring the entries of the archive at `path` back, where the deployment does not have them.

    `into` "postgres": for a Postgres that was lost, or is older than it should be; no flusher may run meanwhile. A
    store of several lanes has several archives: restore one after the other. "log": behind what the deployment's log or
    Postgres has of each thread, for the flushers to move on; see `bufstore.spark.log_archive.into_log`. `threads`: only
    these. `until`: only what was stored before this time (with its offset), and so each thread as it was then.
    `dry_run`: say what would be done, and do nothing (except to make the tables).

    Raises DataLoss when the archive has a gap, was changed, or has two streams with the same numbers, NoLog when there
    is no log to write into, ConfigError when there is no archive, when Postgres and log do not go together, or, into
    Postgres, when the log has positions that the archive has too, or the archive is of a log that the store does not
    have; ConfigDrift when the database's ledger knows other lanes, LogFull, Unavailable errors.
    """
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F

    check_choice(into, Into, "into", ConfigError)
    wanted = None if threads is None else {check_id(t, "thread_id") for t in check_ids(threads, "threads")}
    if tasks is not None and tasks < 1:
        raise ConfigError(f"tasks must be at least 1, not {tasks}")
    if until is not None and until.tzinfo is None:
        raise ConfigError("restore: until needs a time with a UTC offset")
    began = time.perf_counter()
    manifests = manifests_of(spark, path)
    if not manifests:
        raise ConfigError(f"there is no archive at {path}")
    whole(manifests)
    check_numbers(manifests)
    report = RestoreReport(dry_run=dry_run)
    log = loop().run(_setup(deployment, manifests, into, dry_run=dry_run))
    tasks = tasks or int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    # One job for all ranges: so a thread's entries are in order, whatever range they are in. A log that a repair began
    # anew may have other subjects; an entry comes under those of the last one.
    named, found = _subjects(manifests[-1]), list[DataFrame]()
    for subjects, ranges in groupby(manifests, key=_subjects):
        messages = check_ranges(spark, path, list(ranges))
        if until is not None:
            messages = _stored_before(messages, until)
        found.append(pieces_of(messages, subjects, named))
    pieces = reduce(DataFrame.unionByName, found)
    if wanted is not None:
        pieces = pieces.where(F.col("subject").isin([named.of(thread_id) for thread_id in wanted]))
    owned = pieces.repartition(tasks, "subject")
    ordered = owned.sortWithinPartitions("subject", "position", "number")
    with described(ordered, f"bufstore: restore {path} into {into}"), of_servers():
        for counts in outcomes(ordered, partial(_task, deployment, named, into, log, dry_run), RestoreCounts):
            report.add(counts)
    report.missing = len(wanted) - report.threads if wanted is not None else 0
    report.seconds = round(time.perf_counter() - began, 3)
    return report


def _subjects(m: Manifest) -> Subjects:
    return Subjects(m.subject, m.partitions)


def _stored_before(messages: DataFrame, until: datetime) -> DataFrame:
    """Return the messages before the first of this time or later: without holes, whatever the server's clock did."""
    from pyspark.sql import functions as F

    row = messages.where(F.col("stored_at") >= F.lit(until)).agg(F.min("position")).first()
    assert row is not None
    return messages if row[0] is None else messages.where(F.col("position") < row[0])


async def _setup(deployment: Deployment, manifests: Sequence[Manifest], into: Into, *, dry_run: bool) -> LogConfig:
    """Return the settings of the log that is restored into, or that the archive is of; check that all go together."""
    first = await _found(deployment)
    if into == "log":
        if first is None:
            raise NoLog(deployment.stream)
        check_domain(first)
        async with IntoLog(deployment, first.config, dry_run=dry_run) as restoring:
            await restoring.setup()
        return first.config
    config = archived_log(manifests, deployment.stream, deployment.bucket, first.config if first is not None else None)
    log = await _found(replace(deployment, stream=config.stream, bucket=config.bucket)) if config.lane else first
    if log is None:
        epoch, named = epoch_after(manifests, None, 0), None
    else:
        epoch, named = epoch_after(manifests, log.created, log.epoch), log.target
    for found in (first, log):
        if found is not None:
            check_domain(found)
        target = found.target if found is not None else None
        check_kind(f"stream {config.stream}", target, kind_of(PostgresThreadStore), _OTHER_STORE)
    async with IntoPostgres(deployment, config, dry_run=dry_run) as database:
        await database.setup(epoch, named)
    return config


async def _found(deployment: Deployment) -> LogState | None:
    try:
        return await log_of(deployment)
    except NoLog:
        return None


def _restoring(deployment: Deployment, into: Into, log: LogConfig, *, dry_run: bool) -> IntoPostgres | IntoLog:
    kind = IntoLog if into == "log" else IntoPostgres
    return kind(deployment, log, dry_run=dry_run)


def epoch_after(manifests: Sequence[Manifest], created: str | None, epoch: int) -> int:
    """Return the generation of the log that restored rows belong to; `created` and `epoch`: those of the existing log.

    A log that is made later must begin above every position that the rows name, or its entries would be taken for
    applied. Raises ConfigError when there is a log already that does not.
    """
    newest = max(manifests, key=lambda m: m.end)
    if created is None:
        return newest.epoch + 1
    if created != newest.created and first_sequence(epoch) < newest.end:
        raise ConfigError(
            f"the deployment has a log (epoch {epoch}) whose positions the archive (epoch {newest.epoch}) has too: its "
            "entries would be taken for applied. Restore into a deployment that has no log yet, or whose log has a "
            "later epoch, or into the log (into='log')"
        )
    return epoch


def _task(
    deployment: Deployment,
    subjects: Subjects,
    into: Into,
    log: LogConfig,
    dry_run: bool,
    batches: Iterator[pyarrow.RecordBatch],
) -> Iterator[RestoreCounts]:
    yield loop().run(_restore(deployment, into, log, threads_of(subjects, batches), dry_run=dry_run))


async def _restore(
    deployment: Deployment,
    into: Into,
    log: LogConfig,
    threads: Iterator[tuple[str, Iterator[Item]]],
    *,
    dry_run: bool,
) -> RestoreCounts:
    report = RestoreCounts()
    async with _restoring(deployment, into, log, dry_run=dry_run) as restoring:
        # A log takes each thread as a whole, because the place in the archive where it goes on must be found first.
        for portion, goes_on in portions(threads, without_given_up_one_by_one if into == "postgres" else None):
            found = await restoring.apply(portion)
            found.threads -= goes_on
            report.add(found)
    return report
