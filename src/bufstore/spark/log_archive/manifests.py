"""What an archive holds: ranges of the log as Parquet, and a manifest for each that says what is in it.

``<path>/ranges/<start>-<end>-<attempt>/date=…/*.parquet`` hold messages of the stream byte for byte: groups of entries,
and parts of large ones, which may be in the range before that of their group. Their position is their sequence.
``<path>/manifests/<start>-<end>-<attempt>`` says what is in a range: folder, stream, count, checksum. The manifest is
written last: a range without a manifest does not count.

Each attempt has names of its own, and nothing is ever overwritten: what a manifest says is in the archive stays there,
even if several runs archive at once or one dies half-way. Where ranges overlap, each is whole. A range that was made of
small ones names them; from then on, the small ones do not count, and may be removed.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from bufstore.buffer.subjects import Subjects
from bufstore.errors import ArchiveOvertaken, ConfigError, DataLoss
from bufstore.spark.job_description import cores_of
from bufstore.spark.log_archive.checked_files import Totals, total_columns, write_by_date

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: 1: the files are in the folder of the range's name. 1 and 2: a message is an entry, or a piece of one. 3: the entries
#: are in groups.
VERSION = 3
#: With its kind of time: what "timestamp" means is a setting of Spark's.
_SCHEMA = "position bigint, stored_at timestamp_ltz, subject string, header string, body binary"
_HASHED = ("position", "subject", "header", "body")

_PATTERN = re.compile(r"[\[\]{}*?\\]")
_LISTING_TASKS = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
_listing_at_a_time = threading.Lock()
#: How often a folder is listed at most until all that was listed can be read. `expire` may remove a file each time.
_LISTINGS = 1000


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a range of an archive. New fields are added with defaults."""

    version: int
    stream: str
    #: When the stream was made, and its generation: sequences of one generation never come again.
    created: str
    epoch: int
    #: First word of the subjects, and the number of partitions.
    subject: str
    partitions: int
    #: The number of lanes, and which of them it is; 0 lanes: not known.
    lanes: int = 0
    lane: int = 0
    #: Sequences of the stream from `start` to before `end`, and how many messages have them.
    start: int
    end: int
    count: int
    #: The sum of a hash over each message, as a hexadecimal number: it does not depend on the messages' order.
    checksum: str
    #: The attempt that wrote it; "" in an archive of version 1.
    attempt: str = ""
    #: When the newest of its messages was stored, in microseconds of Unix time; 0: not known, or there are none.
    newest_us: int = 0
    #: When the reading began, in microseconds of Unix time; of a merged range, that of its last part; 0: not known.
    read_us: int = 0
    #: When the newest part of a large entry in it was stored, in microseconds of Unix time; 0: not known, or no parts.
    newest_part_us: int = 0
    #: How long after a part the group may be stored that names it, in microseconds; 0: not known.
    parts_for_us: int = 0
    #: The names of the ranges it was made of, and when, in microseconds of Unix time; a range of the log has neither.
    merged: tuple[str, ...] = ()
    merged_us: int = 0

    @property
    def needed_until_us(self) -> int:
        """Until when groups of other ranges may be stored that name parts in this one, in microseconds of Unix time."""
        return self.newest_part_us + self.parts_for_us if self.newest_part_us else 0

    @property
    def name(self) -> str:
        """The name of the range's folder below ``ranges``."""
        range_ = f"{self.start:020d}-{self.end:020d}"
        return f"{range_}-{self.attempt}" if self.attempt else range_


def manifests_of(spark: SparkSession, path: str) -> list[Manifest]:
    """Return the manifests of an archive that count, in order; none for a folder that does not exist.

    Raises ConfigError for a manifest that cannot be read or that a newer release wrote.
    """
    return counting(all_manifests_of(spark, path))


def all_manifests_of(spark: SparkSession, path: str) -> list[Manifest]:
    """Return all manifests, also those of ranges of which others were made: see `manifests_of`."""
    found = []
    for line in texts_of(spark, f"{path}/manifests"):
        try:
            manifest = msgspec.json.decode(line, type=Manifest)
        except msgspec.MsgspecError as e:
            raise ConfigError(f"cannot read a manifest in {path}: {e}") from None
        if manifest.version > VERSION:
            raise ConfigError(f"{path} was written by a newer release (version {manifest.version}): upgrade bufstore")
        found.append(manifest)
    return sorted(found, key=lambda m: (m.start, m.end))


def counting(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Return the manifests of ranges of which no other range was made."""
    merged = {name for m in manifests for name in m.merged}
    return [m for m in manifests if m.name not in merged]


def whole(manifests: Sequence[Manifest]) -> None:
    """Raise DataLoss when something is missing between the ranges of an archive, which may overlap."""
    furthest: dict[str, Manifest] = {}
    for manifest in sorted(manifests, key=lambda m: (m.start, m.end)):
        before = furthest.setdefault(manifest.created, manifest)
        if manifest.start > before.end:
            raise DataLoss(f"the archive has a gap: {before.name} is followed by {manifest.name}")
        if manifest.end > before.end:
            furthest[manifest.created] = manifest


def check_numbers(manifests: Sequence[Manifest]) -> None:
    """Raise DataLoss when two streams have the same numbers: their entries have no order, and may share a position."""
    before: Manifest | None = None
    for manifest in sorted(manifests, key=lambda m: (m.start, m.end)):
        if before is not None and manifest.created != before.created and manifest.start < before.end:
            raise DataLoss(
                f"{before.name} and {manifest.name} are of two streams that have the same numbers: their entries have "
                "no order. Nothing is lost: move the manifests of the stream created at "
                f"{max(before.created, manifest.created)}, with their ranges, into a folder of their own"
            )
        if before is None or manifest.end > before.end:
            before = manifest


def check_begin(manifests: Sequence[Manifest], created: str, begin: int) -> None:
    """Raise ConfigError when another stream has numbers here that the one made at `created` has from `begin` on."""
    other = max((m for m in manifests if m.created != created), key=lambda m: m.end, default=None)
    if other is not None and begin < other.end:
        raise ConfigError(
            f"the archive has {other.name} of another stream, and sequences from {begin} on would be used twice, so "
            "the entries of the two streams could not be told apart. Archive into another folder"
        )


def expired(manifests: Sequence[Manifest], before_us: int) -> list[Manifest]:
    """Return the ranges that may be removed: all their messages were stored before a time (microseconds of Unix time).

    They were also read before it: the clock of the server that stored them may have been far behind.

    The range that ends last stays: the next run continues there. With overlaps, another range may begin last.
    """

    def is_old(m: Manifest) -> bool:
        return not m.count or (m.newest_us > 0 and max(m.newest_us, m.read_us) < before_us)

    return list(takewhile(is_old, sorted(manifests, key=lambda m: (m.end, m.start))[:-1]))


def overlapping(manifests: Sequence[Manifest]) -> bool:
    """Return whether any two of them overlap."""
    ends: dict[str, int] = {}
    for m in sorted(manifests, key=lambda m: m.start):
        if m.start < min(m.end, ends.get(m.created, 0)):
            return True
        ends[m.created] = max(m.end, ends.get(m.created, 0))
    return False


def check_alone(before: Sequence[Manifest], now: Sequence[Manifest], mine: Manifest) -> None:
    """Raise ArchiveOvertaken when another run has archived a part of this range since this run began.

    `before`, `now`: all manifests, for the other run's range may have been merged meanwhile.

    Two runs that look at the same moment may both go on. Then each has read its whole range before anything of it was
    purged, because a purge waits for a manifest. So both ranges are whole, and a restore takes each message once.
    """
    known = {manifest.name for manifest in before}
    for manifest in now:
        if manifest.name not in known and not manifest.merged and overlapping([manifest, mine]):
            raise ArchiveOvertaken(
                f"another run has archived {manifest.name} meanwhile. This run's files (ranges/{mine.name}) do "
                "not count and may be removed. Nothing is lost: the next run continues where that run ended"
            )


def write_range(messages: DataFrame, path: str, manifest: Manifest) -> Manifest:
    """Write a range's messages by date. Returns its manifest, with totals. Raises DataLoss: see `write_by_date`."""
    from pyspark.sql import functions as F

    folder, dated = f"{path}/ranges/{manifest.name}", messages.withColumn("date", F.to_date("stored_at"))
    is_part = F.col("subject") == Subjects(manifest.subject, manifest.partitions).parts
    written = write_by_date(
        dated, folder, lambda: messages_of(messages.sparkSession, folder), _HASHED, F.when(is_part, F.col("stored_at"))
    )
    return msgspec.structs.replace(
        manifest,
        count=written.totals.rows,
        checksum=written.totals.checksum,
        newest_us=written.newest_us,
        newest_part_us=written.newest_of_some_us,
    )


def write_manifest(spark: SparkSession, path: str, manifest: Manifest) -> None:
    write_text(spark, f"{path}/manifests/{manifest.name}", msgspec.json.encode(manifest).decode())


def write_text(spark: SparkSession, path: str, line: str) -> None:
    """Write a line that is there as a whole or not at all. Raises an error of Spark's when the path exists."""
    spark.createDataFrame([(line,)], "value string").coalesce(1).write.mode("error").text(path)


def texts_of(spark: SparkSession, folder: str) -> list[str]:
    """Return the lines of all files in the folders of a folder; none when the folder does not exist.

    Passes over what somebody removes meanwhile, and over nothing else: when a file that was listed cannot be read, and
    one has gone, all that is left is read again. That nothing is left is an error: `expire` leaves the last one, but a
    disk may go. Raises ConfigError for a folder that Spark would read as a pattern for others, but write to as it is.
    """
    from pyspark.errors import AnalysisException

    if found := _PATTERN.search(folder):
        raise ConfigError(f"an archive's path cannot have {found[0]!r}, which Spark takes for a pattern: {folder!r}")

    def listed() -> DataFrame:
        with listing(spark):
            # Of folders that a pattern names, Spark passes over those that go; else it needs them all to be listed.
            return spark.read.option("recursiveFileLookup", "true").text(f"{folder}/[!._]*")

    again = False
    try:
        lines = listed()
        for tries_left in reversed(range(_LISTINGS)):
            files = set(lines.inputFiles())
            try:
                return [line for (line,) in lines.collect()]
            except Exception:
                again = True
                lines = listed()
                left = set(lines.inputFiles())
                if not (tries_left and left and files - left):
                    raise
    except AnalysisException as e:
        if again or e.getCondition() != "PATH_NOT_FOUND":
            raise
    return []


@contextmanager
def listing(spark: SparkSession) -> Iterator[None]:
    """In the block, list folders with at most a task per core: Spark would take one per folder, with little to do."""
    cores = cores_of(spark)
    if cores is None:
        yield
        return
    with _listing_at_a_time:
        before = str(spark.conf.get(_LISTING_TASKS))
        spark.conf.set(_LISTING_TASKS, str(min(int(before), cores)))
        try:
            yield
        finally:
            spark.conf.set(_LISTING_TASKS, before)


def check_ranges(spark: SparkSession, path: str, manifests: Sequence[Manifest]) -> DataFrame:
    """Return the messages of these ranges, each once. Raises DataLoss when they are not those of the manifests.

    One job reads all ranges, however many they are.
    """
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as F

    try:
        messages = messages_of(spark, *(f"{path}/ranges/{m.name}" for m in manifests))
        range_ = F.regexp_extract("_metadata.file_path", ".*/ranges/([^/]+)/", 1).alias("range")
        totals = messages.groupBy(range_).agg(*total_columns(*_HASHED)).collect()
    except AnalysisException as e:
        if e.getCondition() != "PATH_NOT_FOUND":
            raise
        gone = (e.getMessageParameters() or {}).get("path")
        raise DataLoss(f"{gone} is listed in a manifest but no longer exists") from None
    found = {row["range"]: Totals.of(row) for row in totals}
    for m in manifests:
        if found.get(m.name, Totals()) != (m.count, m.checksum):
            raise DataLoss(
                f"{path}/ranges/{m.name} does not hold what its manifest says ({m.count} messages): it was changed"
            )
    return each_once(messages, manifests)


def each_once(messages: DataFrame, manifests: Sequence[Manifest]) -> DataFrame:
    """Return the messages of these ranges without repetitions."""
    return messages.dropDuplicates(["position", "subject", "header"]) if overlapping(manifests) else messages


def messages_of(spark: SparkSession, *folders: str) -> DataFrame:
    """Return the messages in these folders of ranges."""
    if not folders:
        return spark.createDataFrame([], _SCHEMA)
    # Spark takes several folders with dates below them for a mistake, unless it is told to make no columns of folders.
    with listing(spark):
        return spark.read.schema(_SCHEMA).option("recursiveFileLookup", "true").parquet(*folders)
