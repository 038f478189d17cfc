"""Archiving ranges of the log as Parquet, and bringing them back.

``<path>/ranges/<start>-<end>-<attempt>/date=…/*.parquet`` hold messages of the log byte for byte;
``<path>/manifests/<start>-<end>-<attempt>`` says what is in a range: folder, stream, count, checksum. The manifest is
written last: a range without one is none.

Each attempt has names of its own, and nothing is ever overwritten or removed: what a manifest says is in the archive
stays there, whoever archives at the same time, and whatever dies half-way. Where ranges overlap, each is whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bufstore.buffer.target import check_proof, check_same
from bufstore.errors import ArchiveOvertaken, ConfigError, DataLoss, NoLog
from bufstore.nats.ranges import Log, LogReader
from bufstore.postgres.ledger.ledger import PostgresLedger
from bufstore.spark.config import Deployment
from bufstore.spark.jobs import described
from bufstore.spark.worker import loop
from bufstore.threads.memory_store import MemoryThreadStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: 1: the files are in the folder of the range's name.
VERSION = 2
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
    #: The attempt that wrote it; "" in an archive of version 1.
    attempt: str = ""

    @property
    def name(self) -> str:
        """Of its folder below ``ranges``."""
        range_ = f"{self.start:020d}-{self.end:020d}"
        return f"{range_}-{self.attempt}" if self.attempt else range_


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
    manifest is written, the flushers may purge the range (`LogConfig.archive`); a run that died before it told them
    so is made up for by the next one. One archive a deployment: another folder begins anew, and what the flushers keep
    counts from the furthest.

    Raises DataLoss when something of it was purged unread, or the stream is not the one of the newest range: then
    `start` says where to go on, and that something may be missing, before it and behind it. ArchiveOvertaken when
    another run has archived the same range meanwhile. ConfigDrift when the deployment's Postgres (or schema) is not the
    one that the log is flushed into.
    """
    log = loop().run(log_of(deployment))
    if log is None:
        raise NoLog(deployment.stream)
    loop().run(_check_database(deployment))
    manifests = manifests_of(spark, path)
    begin = start if start is not None else _begin(manifests, log)
    if start is None and manifests:
        loop().run(_note(deployment, begin))
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
        attempt=secrets.token_hex(8),
    )
    messages = _read(spark, deployment, found, earliest=not manifests, given=start is not None, tasks=tasks)
    folder = f"{path}/ranges/{found.name}"
    with described(messages, f"bufstore: archive {deployment.stream} {found.name}"):
        count, checksum = _write(messages, folder)
        written = spark.read.schema(SCHEMA).parquet(folder).select(*_COLUMNS)
        if _sum(written) != (count, checksum):
            raise DataLoss(f"{folder} does not hold what was written to it; nothing was noted, archive again")
        found = msgspec.structs.replace(found, count=count, checksum=checksum)
        check_alone(manifests, manifests_of(spark, path), found)
        text = msgspec.json.encode(found).decode()
        line = spark.createDataFrame([(text,)], "value string").coalesce(1)
        line.write.mode("error").text(f"{path}/manifests/{found.name}")
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
    """Raise DataLoss when something is missing between the ranges of an archive, which may overlap."""
    furthest: dict[str, Manifest] = {}
    for manifest in sorted(manifests, key=lambda m: (m.start, m.end)):
        before = furthest.setdefault(manifest.created, manifest)
        if manifest.start > before.end:
            raise DataLoss(f"the archive has a gap: {before.name} is followed by {manifest.name}")
        if manifest.end > before.end:
            furthest[manifest.created] = manifest


def overlap(one: Manifest, other: Manifest) -> bool:
    """Whether both have messages of the same positions."""
    return one.created == other.created and one.start < other.end and other.start < one.end


def check_alone(before: Sequence[Manifest], now: Sequence[Manifest], mine: Manifest) -> None:
    """Raise ArchiveOvertaken when a range was archived by somebody else since this run began.

    Two that look at the same moment may both go on. Then each has read all of its range before anything of it was
    purged, because that waits for a manifest; so both are whole, and a restore takes each message once.
    """
    known = {manifest.name for manifest in before}
    for manifest in now:
        if manifest.name not in known and overlap(manifest, mine):
            raise ArchiveOvertaken(
                f"another run has archived {manifest.name} meanwhile; this one's files (ranges/{mine.name}) do not "
                "count and may be removed. Nothing is lost: the next run goes on where that one ended"
            )


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


def _read(
    spark: SparkSession, deployment: Deployment, m: Manifest, *, earliest: bool, given: bool, tasks: int | None
) -> DataFrame:
    server = deployment.server
    options: dict[str, Any] = {
        "nats": ",".join(server.servers),
        "stream": deployment.stream,
        "form": "messages",
        # Where an archive begins, messages may be missing that were purged before; later none may, unless who says
        # where to go on takes it as it is.
        "startingPosition": "earliest" if earliest and not given else m.start,
        "endingPosition": m.end,
        "failOnDataLoss": not given,
        "credentialsFile": server.credentials,
        "user": server.user,
        "password": server.password,
        "token": server.token,
        "domain": server.domain,
        "numPartitions": tasks,
    }
    named = {name: str(value) for name, value in options.items() if value is not None}
    return spark.read.format("threadlog").options(**named).load()


def _write(messages: DataFrame, folder: str) -> tuple[int, str]:
    """Write the messages by date; how many there were, and their checksum, as they passed by."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    observed = Observation()
    dated = messages.observe(observed, F.count("*").alias("count"), _checksum().alias("checksum"))
    dated = dated.withColumn("date", F.to_date("stored_at"))
    dated.write.mode("error").partitionBy("date").parquet(folder)
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


async def _check_database(deployment: Deployment) -> None:
    """Raise ConfigDrift for another database than that of the log: its flushers would never see the note."""
    named = (await deployment.look()).target
    ledger = PostgresLedger(deployment.postgres, MemoryThreadStore(), schema=deployment.schema)
    await ledger.open()
    try:
        noted = await ledger.target()
    finally:
        await ledger.aclose()
    check_same(deployment.stream, named, noted)
    check_proof(deployment.stream, named, proven=named is None or noted is not None)


async def _note(deployment: Deployment, end: int) -> None:
    # What it flushes into is never asked.
    ledger = PostgresLedger(deployment.postgres, MemoryThreadStore(), schema=deployment.schema)
    await ledger.open()
    try:
        await ledger.set_archived(end)
    finally:
        await ledger.aclose()
