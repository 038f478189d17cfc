"""Archiving ranges of the log as Parquet, and bringing them back.

``<path>/ranges/<start>-<end>/date=…/*.parquet`` hold messages of the log byte for byte;
``<path>/manifests/<start>-<end>`` says what is in a range: stream, count, checksum. The manifest is written last: a
range without one is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from bufstore.errors import ConfigError, DataLoss, NoLog
from bufstore.memory.store import MemoryThreadStore
from bufstore.nats.ranges import Log, LogReader
from bufstore.postgres.ledger import PostgresLedger
from bufstore.spark.config import Deployment
from bufstore.spark.jobs import described
from bufstore.spark.worker import loop

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VERSION = 1
SCHEMA = "position bigint, stored_at timestamp, subject string, header string, body binary"
_COLUMNS = ("position", "stored_at", "subject", "header", "body")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a range of an archive. New fields are added with defaults."""

    version: int
    stream: str
    #: When the stream was made, and its generation: positions of one generation never come again.
    created: str
    epoch: int
    #: First word of the subjects, and the number of partitions.
    subject: str
    partitions: int
    #: Positions from `start` to before `end`.
    start: int
    end: int
    count: int
    #: Sum of a hash over each message, as hexadecimal number: the same in whatever order they come.
    checksum: str

    @property
    def name(self) -> str:
        """The folder of the range."""
        return f"{self.start:020d}-{self.end:020d}"


class ArchiveReport(msgspec.Struct, kw_only=True):
    """What was archived; `count` 0: there was nothing new."""

    start: int
    end: int
    count: int
    path: str


def archive(
    spark: SparkSession, deployment: Deployment, path: str, *, start: int | None = None, tasks: int | None = None
) -> ArchiveReport:
    """Write what is in the log and not in the archive at `path` (any file system that Spark can write to) as Parquet.

    Begins where the newest range ends; a new archive begins with the log's first message, or at `start`. When the
    manifest is written, the flushers may purge the range (`LogConfig.archive`). One archive a deployment: another
    folder begins anew, and what the flushers keep counts from the furthest.

    Raises DataLoss when something of it was purged unread, or the stream is not the one of the newest range: then
    `start` says where to go on, and that something may be missing before.
    """
    log = loop().run(log_of(deployment))
    if log is None:
        raise NoLog(deployment.stream)
    manifests = manifests_of(spark, path)
    begin = start if start is not None else _begin(manifests, log)
    if begin >= log.end:
        return ArchiveReport(start=begin, end=log.end, count=0, path=path)
    found = Manifest(
        version=VERSION,
        stream=deployment.stream,
        created=log.created,
        epoch=log.epoch,
        subject=log.config.subject,
        partitions=log.config.partitions,
        start=begin,
        end=log.end,
        count=0,
        checksum="",
    )
    messages = _read(spark, deployment, found, earliest=not manifests and start is None, tasks=tasks)
    folder = f"{path}/ranges/{found.name}"
    with described(messages, f"bufstore: archive {deployment.stream} {found.name}"):
        count, checksum = _write(messages, folder)
        written = spark.read.schema(SCHEMA).parquet(folder).select(*_COLUMNS)
        if _sum(written) != (count, checksum):
            raise DataLoss(f"{folder} does not hold what was written to it; nothing was noted, archive again")
        found = msgspec.structs.replace(found, count=count, checksum=checksum)
        text = msgspec.json.encode(found).decode()
        line = spark.createDataFrame([(text,)], "value string").coalesce(1)
        line.write.mode("overwrite").text(f"{path}/manifests/{found.name}")
    loop().run(_note(deployment, found.end))
    return ArchiveReport(start=found.start, end=found.end, count=found.count, path=path)


def manifests_of(spark: SparkSession, path: str) -> list[Manifest]:
    """The manifests of an archive, in order; none for a folder that is not there.

    Raises ConfigError for one that cannot be read, or was written by a newer release.
    """
    from pyspark.errors import AnalysisException

    try:
        lines = spark.read.text(f"{path}/manifests/*").collect()
    except AnalysisException as e:
        if e.getCondition() == "PATH_NOT_FOUND":
            return []
        raise
    found = []
    for (line,) in lines:
        try:
            manifest = msgspec.json.decode(line, type=Manifest)
        except msgspec.MsgspecError as e:
            raise ConfigError(f"a manifest in {path} cannot be read: {e}") from None
        if manifest.version > VERSION:
            raise ConfigError(f"{path} was written by a newer release (version {manifest.version}): upgrade bufstore")
        found.append(manifest)
    return sorted(found, key=lambda m: (m.start, m.end))


def whole(manifests: Sequence[Manifest]) -> None:
    """Raise DataLoss when something is missing between the ranges of an archive."""
    for before, after in pairwise(manifests):
        if after.start > before.end and after.created == before.created:
            raise DataLoss(f"the archive has a gap: {before.name} is followed by {after.name}")


def check_range(spark: SparkSession, path: str, manifest: Manifest) -> DataFrame:
    """The messages of a range. Raises DataLoss when they are not those of the manifest."""
    from pyspark.errors import AnalysisException

    folder = f"{path}/ranges/{manifest.name}"
    try:
        messages = spark.read.schema(SCHEMA).parquet(folder).select(*_COLUMNS)
        found = _sum(messages)
    except AnalysisException:
        found = None
    if found != (manifest.count, manifest.checksum):
        raise DataLoss(f"{folder} does not hold what its manifest says ({manifest.count} messages): it was changed")
    return messages


def _begin(manifests: Sequence[Manifest], log: Log) -> int:
    whole(manifests)
    if not manifests:
        return log.first
    last = max(manifests, key=lambda m: m.end)
    if last.created != log.created:
        raise DataLoss(
            f"the archive ends with {last.name} of a stream that is no more: whether all of that was archived nobody "
            f"can tell. Give start={log.first} to go on with the one that there is"
        )
    return last.end


def _read(spark: SparkSession, deployment: Deployment, m: Manifest, *, earliest: bool, tasks: int | None) -> DataFrame:
    server = deployment.server
    options: dict[str, Any] = {
        "nats": ",".join(server.servers),
        "stream": deployment.stream,
        "form": "messages",
        # Where an archive begins, messages may be missing that were purged before; later none may.
        "startingPosition": "earliest" if earliest else m.start,
        "endingPosition": m.end,
        "credentialsFile": server.credentials,
        "user": server.user,
        "password": server.password,
        "token": server.token,
        "domain": server.domain,
        "numPartitions": tasks,
    }
    given = {name: str(value) for name, value in options.items() if value is not None}
    return spark.read.format("threadlog").options(**given).load()


def _write(messages: DataFrame, folder: str) -> tuple[int, str]:
    """Write the messages by date; how many there were, and their checksum, as they passed by."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    observed = Observation()
    dated = messages.observe(observed, F.count("*").alias("count"), _checksum().alias("checksum"))
    dated = dated.withColumn("date", F.to_date("stored_at"))
    dated.write.mode("overwrite").partitionBy("date").parquet(folder)
    found = observed.get
    return int(found["count"]), _hex(found["checksum"])


def _sum(messages: DataFrame) -> tuple[int, str]:
    from pyspark.sql import functions as F

    found = messages.agg(F.count("*").alias("count"), _checksum().alias("checksum")).first()
    assert found is not None
    return int(found["count"]), _hex(found["checksum"])


def _checksum() -> Any:
    from pyspark.sql import functions as F

    # Decimals do not overflow; the sum does not depend on the order.
    return F.sum(F.xxhash64("position", "subject", "header", "body").cast("decimal(38,0)"))


def _hex(total: Any) -> str:
    return f"{int(total or 0) & ((1 << 128) - 1):032x}"


async def log_of(deployment: Deployment) -> Log | None:
    """The deployment's log as it is now; None if there is none."""
    reader = LogReader(deployment.server, deployment.stream, deployment.bucket)
    await reader.open()
    try:
        return await reader.look()
    except NoLog:
        return None
    finally:
        await reader.aclose()


async def _note(deployment: Deployment, end: int) -> None:
    # What it flushes into is never asked.
    ledger = PostgresLedger(deployment.postgres, MemoryThreadStore(), schema=deployment.schema)
    await ledger.open()
    try:
        await ledger.set_archived(end)
    finally:
        await ledger.aclose()
