"""Archives ranges of the log as Parquet: from where the newest range ends to the end of the log.

The manifest is written last; only then may the flushers purge the range.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bufstore.buffer.places import first_place, group_of
from bufstore.buffer.subjects import first_position
from bufstore.buffer.target import check_proof, check_same
from bufstore.errors import ConfigDrift, ConfigError, DataLoss
from bufstore.nats.ranges import LogReader, LogState
from bufstore.spark.config import Deployment
from bufstore.spark.connection_options import connection_options
from bufstore.spark.job_description import cores_of, described
from bufstore.spark.log_archive.manifests import (
    VERSION,
    Manifest,
    all_manifests_of,
    check_alone,
    check_begin,
    counting,
    whole,
    write_manifest,
    write_range,
)
from bufstore.spark.process_loop import loop
from bufstore.spark.worker_errors import of_servers, told_in
from bufstore.threads.protocol import DOMAIN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class ArchiveReport(msgspec.Struct, kw_only=True):
    """What was archived: `count` messages of the stream, from sequence `start` to before `end`. 0: nothing was new."""

    start: int
    end: int
    count: int
    path: str


def archive(
    spark: SparkSession, deployment: Deployment, path: str, *, start: int | None = None, tasks: int | None = None
) -> ArchiveReport:
    """Write what the archive at `path` lacks of the log, as Parquet, to any file system that Spark can write to.

    It begins where the newest range ends; a new archive begins with the log's first message, or at sequence `start`.
    Once the manifest is written, the flushers may purge the range (`LogConfig.archive`); if a run dies before it tells
    them, the next run does. Keep one archive for each deployment: another folder starts over, and the flushers keep
    only what lies above the furthest position that was archived. So once entries that are noted as archived have left
    the log, a folder without an archive is refused (ConfigError) unless `start` is given: it may not be mounted.

    Raises DataLoss when a part was purged before it was archived, when the log ends before the archive does, or when
    the stream is not that of the newest range: then give `start` to continue there, and accept that entries may be
    missing. Raises ConfigError for a `start` behind the newest range of the same stream, which would leave a gap, and
    when another stream in the archive has the same numbers: that needs another folder. Raises ArchiveOvertaken when
    another run has archived the same range meanwhile, and ConfigDrift when the deployment's Postgres (or schema) is not
    the one that the log is flushed into, or the log is not one of threads, whose entries no restore can read;
    LogUnavailable, StoreUnavailable.
    """
    if tasks is not None and tasks < 1:
        raise ConfigError(f"tasks must be at least 1, not {tasks}")
    # Before the log: a run that ends in between has archived more of it than a look at the log before that run shows.
    known = all_manifests_of(spark, path)
    manifests = counting(known)
    log = loop().run(log_of(deployment, max((m.end for m in manifests), default=0)))
    check_domain(log)
    archived = loop().run(_archived(deployment, log))
    begin = _checked(start, manifests, log) if start is not None else _begin(manifests, log, archived)
    check_begin(manifests, log.created, begin)
    if start is None and manifests:
        loop().run(_note(deployment, log, begin))
    if begin >= log.end:
        return ArchiveReport(start=begin, end=log.end, count=0, path=path)
    found = Manifest(
        version=VERSION,
        stream=deployment.stream,
        created=log.created,
        epoch=log.epoch,
        subject=log.config.subject,
        partitions=log.config.partitions,
        lanes=log.config.lanes,
        lane=log.config.lane,
        start=begin,
        end=log.end,
        count=0,
        checksum="",
        attempt=secrets.token_hex(8),
        read_us=time.time_ns() // 1000,
        parts_for_us=round(log.config.failover_window_s * 1e6),
    )
    # Before it reads: whoever erases something meanwhile must know where it may still be.
    loop().run(_begun(deployment, log, found.end))
    messages = _read(spark, deployment, found, earliest=not manifests, given=start is not None, tasks=tasks)
    with described(messages, f"bufstore: archive {deployment.stream} {found.name}"), of_servers():
        try:
            found = write_range(messages, path, found)
        except Exception as e:
            # What a faster run has archived may have been purged before this run could read it.
            check_alone(known, all_manifests_of(spark, path), found)
            told = told_in(e)
            if told is not None and told.name == DataLoss.__name__:
                raise DataLoss(f"{told.text}. Give start={begin} to go on without what is gone") from e
            raise
        check_alone(known, all_manifests_of(spark, path), found)
        write_manifest(spark, path, found)
    loop().run(_note(deployment, log, found.end))
    return ArchiveReport(start=found.start, end=found.end, count=found.count, path=path)


def _begin(manifests: Sequence[Manifest], log: LogState, archived: int) -> int:
    """Return where to begin. `archived`: up to which place Postgres notes the log as archived, wherever that was."""
    whole(manifests)
    if not manifests:
        if first_position(log.epoch) < first_place(log.first) <= archived:
            raise ConfigError(
                f"the log is archived up to message {group_of(archived)}, and no longer has what comes before "
                f"{log.first}; but there is no archive in this folder: is it mounted? To begin another archive here, "
                f"without those messages, give start={log.first}"
            )
        return log.first
    last = max(manifests, key=lambda m: m.end)
    if last.created == log.created and last.end > log.end:
        raise DataLoss(
            f"the archive ends with {last.name}, but the log ends before {log.end}: it has lost its end and "
            "will reuse these positions. Repair it (`bufstore repair`), then give start to continue with the new log"
        )
    if last.created != log.created:
        check_begin(manifests, log.created, log.first)
        raise DataLoss(
            f"the archive ends with {last.name} of a stream that no longer exists, so its last entries may be "
            f"missing. Give start={log.first} to continue with the stream that exists now"
        )
    return last.end


def _checked(start: int, manifests: Sequence[Manifest], log: LogState) -> int:
    """Return `start`. Raises ConfigError if it is no sequence, or nothing could ever close the gap before it."""
    if start < 0:
        raise ConfigError(f"start must be a sequence of the stream, not {start}")
    end = max((m.end for m in manifests if m.created == log.created), default=start)
    if start > end:
        raise ConfigError(
            f"the archive ends at {end}: to begin at {start} would leave a gap, and an archive with a gap cannot be "
            f"restored. Give start={end} to continue; what the log no longer has is then left out"
        )
    return start


def _read(
    spark: SparkSession, deployment: Deployment, m: Manifest, *, earliest: bool, given: bool, tasks: int | None
) -> DataFrame:
    # Messages may have been purged before an archive begins. Later none may be missing, unless the caller says where to
    # continue, and so accepts the gap.
    start = "earliest" if earliest and not given else m.start
    return messages_from(
        spark, deployment, startingPosition=start, endingPosition=m.end, failOnDataLoss=not given, numPartitions=tasks
    )


def messages_from(spark: SparkSession, deployment: Deployment, **options: Any) -> DataFrame:
    """Return messages of the deployment's log, byte for byte. `options`: those of the source that are not None."""
    given = {"stream": deployment.stream, "form": "messages", "minPartitions": cores_of(spark), **options}
    named = {name: str(value) for name, value in given.items() if value is not None}
    return spark.read.format("threadlog").options(**named, **connection_options(deployment.server)).load()


def check_domain(log: LogState) -> None:
    """Raise ConfigDrift for a log whose entries are not those of threads of messages."""
    if log.target.domain != DOMAIN:
        raise ConfigDrift(
            f"stream {log.config.stream}",
            "domain",
            expected=DOMAIN,
            found=log.target.domain,
            way_out="An archive holds threads of messages, and cannot bring anything else back: back up the database.",
        )


async def log_of(deployment: Deployment, reached: int = 0) -> LogState:
    """Return the deployment's log as it is now; `reached`: see `LogReader.look`. Raises NoLog."""
    reader = LogReader(deployment.server, deployment.stream, deployment.bucket)
    await reader.open()
    try:
        return await reader.look(reached=reached)
    finally:
        await reader.aclose()


async def _archived(deployment: Deployment, log: LogState) -> int:
    """Return up to which place the log is archived, as its database notes.

    Raises ConfigDrift for a database that is not the log's: the log's flushers would never see the note in it.
    """
    async with deployment.database(log.config) as (_, ledger):
        noted, archived = await ledger.target(), await ledger.archived()
    check_same(deployment.stream, log.target, noted)
    check_proof(deployment.stream, log.target, proven=noted is not None)
    return archived


async def _begun(deployment: Deployment, log: LogState, end: int) -> None:
    async with deployment.database(log.config) as (_, ledger):
        await ledger.begin_archiving(first_place(end))


async def _note(deployment: Deployment, log: LogState, end: int) -> None:
    async with deployment.database(log.config) as (_, ledger):
        await ledger.set_archived(first_place(end))
