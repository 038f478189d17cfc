"""The table of an archive that people query: made of its ranges, in parts that are added, merged and expire.

``<path>/tables/entries/part=<start>-<end>-<attempt>/date=…/*.parquet`` hold rows: see
`bufstore.spark.log_archive.entry_table`. ``<path>/tables/manifests/<start>-<end>-<attempt>`` says what is in a part,
and is written last: a part without a manifest does not count. No part is ever changed. What the ranges hold stays, so
the table can be made again. `compact` and `expire` also work on the ranges.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial, reduce
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow

from bufstore.buffer.places import first_place
from bufstore.buffer.subjects import Subjects
from bufstore.errors import ConfigError, DataLoss
from bufstore.spark.config import Deployment
from bufstore.spark.job_description import context_of, described
from bufstore.spark.log_archive.archive_job import log_of, messages_from
from bufstore.spark.log_archive.archived_entries import PIECES, items_of_rows, pieces_of, rows_of
from bufstore.spark.log_archive.checked_files import write_by_date
from bufstore.spark.log_archive.entry_table import APPLIED, SCHEMA, Known, known_of, thread_rows
from bufstore.spark.log_archive.manifests import (
    Manifest,
    all_manifests_of,
    check_numbers,
    check_ranges,
    each_once,
    listing,
    manifests_of,
    messages_of,
    texts_of,
    whole,
    write_text,
)
from bufstore.spark.log_archive.small_ranges import RANGE_MESSAGES, merge_small, removable
from bufstore.spark.log_archive.table_parts import VERSION, Part, cover, newest_us, replaced, to_merge
from bufstore.spark.process_loop import loop
from bufstore.spark.task import in_task
from bufstore.unix_time import us_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

#: The first version of ranges that hold groups of entries.
_GROUPS_SINCE = 3
#: The parts of a large entry stand in front of it, within fewer than this many messages.
_PARTS_WITHIN = 1 << 20
#: How far back threads are looked up. An entry's predecessor is in the log when the entry is written, so it is not much
#: older than the log.
_LOOK_BACK = timedelta(days=7)
#: A part of this many rows is not merged with others any more.
ROWS = 10_000_000
#: How long a part that was merged stays, for readers that have begun to read it.
_GRACE = timedelta(days=1)
_ROWS_AT_ONCE = 256
#: What the checksum of a part covers.
_HASHED = ("position", "thread_id", "entry_id", "effect", "version", "messages", "run")


class TablesReport(msgspec.Struct, kw_only=True):
    """What was done: the message before which (`end`) there are rows; how many rows, parts, ranges were written."""

    end: int = 0
    rows: int = 0
    parts: int = 0
    ranges: int = 0


def tabulate(spark: SparkSession, path: str) -> TablesReport:
    """Add to the table of the archive at `path` what it lacks of the archive's ranges.

    You may repeat it, stop it, and run it several times at once: only parts with a manifest count, and where parts
    overlap, each entry counts once. Raises DataLoss when the archive has a gap or was changed, ConfigError when there
    is no archive.
    """
    manifests = manifests_of(spark, path)
    if not manifests:
        raise ConfigError(f"there is no archive at {path}")
    whole(manifests)
    parts = _parts_of(spark, path)
    report = TablesReport(end=_end(parts))
    for ranges in _generations(manifests):
        start, end = max(report.end, ranges[0].start), max(m.end for m in ranges)
        if start >= end:
            continue
        rows = _typed(spark, path, ranges, parts, _between(spark, path, ranges, start, end))
        part = _write(spark, path, rows, start, end)
        parts.append(part)
        report = TablesReport(end=end, rows=report.rows + part.count, parts=report.parts + 1)
    return report


def entries(spark: SparkSession, path: str, deployment: Deployment | None = None) -> DataFrame:
    """Return the entries in the table of the archive at `path`, each once, as typed rows; with a `deployment`, also
    those that its log holds behind them.

    With a deployment, the result is complete: it includes entries that are archived but not in the table yet. Raises
    DataLoss when the log has lost what is not archived, ConfigError when there is no archive.
    """
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F

    parts = _parts_of(spark, path)
    found = _table(spark, path, parts)
    if deployment is None:
        return found
    manifests = manifests_of(spark, path)
    whole(manifests)
    at, generations = _end(parts), _generations(manifests)
    if not generations:
        raise ConfigError(f"there is no archive at {path}")
    tails = [found]
    for ranges in generations:
        end = max(m.end for m in ranges)
        messages = _between(spark, path, ranges, at, end)
        if ranges is generations[-1]:
            messages = messages.union(_log(spark, deployment, ranges[-1], end))
        elif at >= end:
            continue
        tails.append(_typed(spark, path, ranges, parts, messages).withColumn("part", F.lit(None).cast("string")))
    return reduce(DataFrame.unionByName, tails)


def compact(spark: SparkSession, path: str, *, rows: int = ROWS, range_messages: int = RANGE_MESSAGES) -> TablesReport:
    """Merge small neighbours: parts into parts of at most `rows` rows, ranges into ranges of at most `range_messages`
    messages. Readers notice nothing.

    `expire` removes what they were made of. Raises DataLoss when a range was changed.
    """
    from pyspark.sql import functions as F

    parts = _parts_of(spark, path)
    report = TablesReport(end=_end(parts), ranges=merge_small(spark, path, range_messages))
    for start, end in to_merge(parts, rows):
        found = _table(spark, path, [p for p in parts if p.start < end and start < p.end]).drop("part")
        within = F.col("position").between(first_place(start), first_place(end) - 1)
        ordered = found.where(within).repartition("thread_id").sortWithinPartitions("thread_id", "position")
        merged = _write(spark, path, ordered, start, end)
        report.rows, report.parts = report.rows + merged.count, report.parts + 1
    return report


def expire(
    spark: SparkSession, path: str, *, before: datetime | None = None, ranges: bool = False, grace: timedelta = _GRACE
) -> int:
    """Remove parts and ranges that were merged into others longer than `grace` ago, and parts whose entries were all
    stored before `before`; with `ranges`, also ranges whose messages all were, and were archived before it. Returns how
    many were removed.

    The last part and the last range stay, and ranges that the table does not have yet, if there is a table; also ranges
    with parts of large entries that may be entries of a range which stays. Entries of removed ranges cannot be restored
    any more. Raises PermissionError when the file system removes nothing; ConfigError when `before` has no offset, and
    on Spark Connect, which cannot remove files.
    """
    if before is not None and before.tzinfo is None:
        raise ConfigError("expire: before needs a time with a UTC offset")
    context = context_of(spark.range(0))
    if context is None:
        raise ConfigError("Spark Connect cannot remove files: expire an archive from a session with a driver")
    parts = _parts_of(spark, path)
    settled = us_of(datetime.now(UTC) - grace)
    gone = replaced(parts, settled)
    if before is not None:
        last = _end(parts)
        gone += [p for p in parts if p not in gone and p.end < last and p.newest_us < us_of(before)]
    for part in gone:  # the manifest first: without it the part does not count
        _remove(context, f"{path}/tables/manifests/{part.name}")
        _remove(context, f"{path}/tables/entries/part={part.name}")
    old = removable(
        all_manifests_of(spark, path),
        settled,
        us_of(before) if ranges and before is not None else 0,
        _end(parts) if parts else None,
    )
    for manifest in old:
        _remove(context, f"{path}/manifests/{manifest.name}")
        _remove(context, f"{path}/ranges/{manifest.name}")
    return len(gone) + len(old)


def _remove(context: Any, path: str) -> None:
    """Remove a folder. Raises PermissionError if it is still there: what belongs to it must stay then, too."""
    at = context._jvm.org.apache.hadoop.fs.Path(path)
    files = at.getFileSystem(context._jsc.hadoopConfiguration())
    if not files.delete(at, True) and files.exists(at):
        raise PermissionError(f"cannot remove {path}: the file system refuses it; what belongs to it is still there")


def _parts_of(spark: SparkSession, path: str) -> list[Part]:
    found = []
    for line in texts_of(spark, f"{path}/tables/manifests"):
        try:
            part = msgspec.json.decode(line, type=Part)
        except msgspec.MsgspecError as e:
            raise ConfigError(f"cannot read a manifest of the table in {path}: {e}") from None
        if part.version > VERSION:
            raise ConfigError(f"{path} was written by a newer release (version {part.version}): upgrade bufstore")
        found.append(part)
    return sorted(found, key=lambda p: (p.start, p.end, p.attempt))


def _end(parts: Sequence[Part]) -> int:
    """Return the sequence before which everything is in the table."""
    return max((p.end for p in parts), default=0)


def _generations(manifests: Sequence[Manifest]) -> list[list[Manifest]]:
    """Return the ranges that hold groups, a list for each stream."""
    grouped = [m for m in manifests if m.version >= _GROUPS_SINCE]
    check_numbers(grouped)
    return [list(some) for _, some in groupby(grouped, key=lambda m: (m.created, m.subject, m.partitions))]


def _of_spark(schema: pyarrow.Schema) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)


def _table(spark: SparkSession, path: str, parts: Sequence[Part]) -> DataFrame:
    """Return the rows of these parts that count."""
    from pyspark.sql import functions as F

    root, pieces = f"{path}/tables/entries", cover(parts)
    schema = _of_spark(SCHEMA).add("part", "string")
    if not pieces:
        return spark.createDataFrame([], schema)
    folders = [f"{root}/part={piece.part.name}" for piece in pieces]
    with listing(spark):
        found = spark.read.schema(schema).option("basePath", root).parquet(*folders)
    for part, start, end in pieces:
        if (start, end) != (part.start, part.end):
            within = F.col("position").between(first_place(start), first_place(end) - 1)
            found = found.where((F.col("part") != part.name) | within)
    return found


def _between(spark: SparkSession, path: str, ranges: Sequence[Manifest], start: int, end: int) -> DataFrame:
    """Return the messages of these ranges from sequence `start` to before `end`, each once."""
    from pyspark.sql import functions as F

    some = [m for m in ranges if m.start < end and start < m.end]
    if not some:
        return messages_of(spark)
    return check_ranges(spark, path, some).where(F.col("position").between(start, end - 1))


def _log(spark: SparkSession, deployment: Deployment, newest: Manifest, start: int) -> DataFrame:
    """Return the messages that the log holds from sequence `start`, the end of the newest range, on."""
    log = loop().run(log_of(deployment, newest.end))
    if log.created != newest.created:
        raise DataLoss(
            f"the archive ends with {newest.name} of a stream that no longer exists: archive the present stream first"
        )
    return messages_from(spark, deployment, startingPosition=start).select(*messages_of(spark).columns)


def _typed(
    spark: SparkSession, path: str, ranges: Sequence[Manifest], parts: Sequence[Part], messages: DataFrame
) -> DataFrame:
    """Return the rows of `messages`, which stand behind these parts of the table, and in (or behind) these ranges."""
    from pyspark.sql import functions as F

    subjects, at = Subjects(ranges[0].subject, ranges[0].partitions), _end(parts)
    before = [m for m in ranges if m.start < at and at - _PARTS_WITHIN < m.end]
    if before:
        large = each_once(messages_of(spark, *(f"{path}/ranges/{m.name}" for m in before)), before)
        messages = messages.union(large.where((F.col("subject") == subjects.parts) & (F.col("position") < at)))
    pieces = pieces_of(messages, subjects, subjects)
    if parts:
        since = datetime.fromtimestamp(newest_us(parts, us_of(datetime.now(UTC))) / 1e6, UTC) - _LOOK_BACK
        earlier = _table(spark, path, parts).where(F.col("stored_at") >= F.lit(since))
        of_last = F.when(F.col("effect") == APPLIED, F.col("position"))
        known = earlier.groupBy("thread_id").agg(
            F.max("position").alias("position"),
            F.max_by(F.struct("entry_id", "version", "kind"), of_last).alias("applied"),
        )
        pieces = pieces.union(known.mapInArrow(partial(_known, subjects), _of_spark(PIECES)))
    owned = pieces.repartition("subject").sortWithinPartitions("subject", "position", "number")
    return owned.mapInArrow(partial(_rows, subjects), _of_spark(SCHEMA))


def _known(subjects: Subjects, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Yield what is known of threads, as rows that come in front of the threads' pieces."""
    for batch in batches:
        found = []
        for row in batch.to_pylist():
            known = known_of(row["position"], row["applied"])
            made = {"subject": subjects.of(row["thread_id"]), "position": row["position"], "number": -1}
            found.append(made | {"body": msgspec.json.encode(known)})
        yield pyarrow.RecordBatch.from_pylist(found, PIECES)


def _rows(subjects: Subjects, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    with in_task():
        made: list[dict[str, Any]] = []
        size = 0
        for row in _each(subjects, batches):
            made.append(row)
            size += row["bytes"] or 0
            if len(made) >= _ROWS_AT_ONCE or size > 8 << 20:
                yield pyarrow.RecordBatch.from_pylist(made, SCHEMA)
                made, size = [], 0
        yield pyarrow.RecordBatch.from_pylist(made, SCHEMA)


def _each(subjects: Subjects, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[dict[str, Any]]:
    for thread_id, rows in rows_of(subjects, batches):
        known, pieces = None, rows
        first = next(rows)
        if first["number"] == -1:
            known = msgspec.json.decode(first["body"], type=Known)
        else:
            pieces = chain((first,), rows)
        yield from thread_rows(thread_id, subjects.partition(thread_id), known, items_of_rows(thread_id, pieces))


def _write(spark: SparkSession, path: str, rows: DataFrame, start: int, end: int) -> Part:
    """Write a part and its manifest. Raises DataLoss: see `write_by_date`."""
    part = Part(
        version=VERSION, start=start, end=end, count=0, checksum="", newest_us=0, made_us=time.time_ns() // 1000,
        attempt=secrets.token_hex(8),
    )  # fmt: skip
    folder = f"{path}/tables/entries/part={part.name}"
    with described(rows, f"bufstore: table {part.name}"):
        written = write_by_date(rows, folder, lambda: spark.read.schema(_of_spark(SCHEMA)).parquet(folder), _HASHED)
    totals = written.totals
    part = msgspec.structs.replace(part, count=totals.rows, checksum=totals.checksum, newest_us=written.newest_us)
    write_text(spark, f"{path}/tables/manifests/{part.name}", msgspec.json.encode(part).decode())
    return part
