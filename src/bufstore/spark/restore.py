"""Bringing an archive back into Postgres: what a flush would have made of its entries, thread by thread.

The entries keep the positions that they had, and a thread's row says up to which it is applied. So a restore may be
repeated, stopped and gone on with, and what Postgres has already is left as it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from bufstore.buffer.chain import Row
from bufstore.buffer.entry import Malformed, StoredMessage, assemble
from bufstore.buffer.ports import Decision, FlushFailed
from bufstore.buffer.settler import decide_thread
from bufstore.buffer.share import Item
from bufstore.buffer.subjects import Subjects, first_position
from bufstore.errors import ConfigError, MalformedEntry, StoreUnavailable
from bufstore.postgres.ledger import PostgresLedger
from bufstore.postgres.store import PostgresThreadStore
from bufstore.spark.archive import Manifest, check_range, log_of, manifests_of, whole
from bufstore.spark.config import Deployment
from bufstore.spark.jobs import described
from bufstore.spark.worker import loop
from bufstore.threads.coalesce import coalesce

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import SparkSession

_OUTCOME = "threads bigint, applied bigint, present bigint, refused bigint, reasons array<string>"
_SHOWN = 10
#: Entries of one transaction.
_AT_ONCE = 5000


class RestoreReport(msgspec.Struct, kw_only=True):
    """What a restore did, or (``dry_run``) would do."""

    threads: int = 0
    #: Entries that were applied, and that Postgres had already.
    applied: int = 0
    present: int = 0
    #: Entries that cannot be applied: what they build on is neither in the archive nor in Postgres. Nothing was done
    #: with them, nor with those behind them in their threads.
    refused: int = 0
    reasons: list[str] = msgspec.field(default_factory=list)
    dry_run: bool = False
    seconds: float = 0.0

    def add(self, threads: int, applied: int, present: int, refused: int, reasons: Sequence[str]) -> None:
        """Add what a part came to."""
        self.threads += threads
        self.applied += applied
        self.present += present
        self.refused += refused
        self.reasons = [*self.reasons, *reasons][:_SHOWN]


def restore(
    spark: SparkSession, path: str, deployment: Deployment, *, tasks: int | None = None, dry_run: bool = False
) -> RestoreReport:
    """Apply the entries of the archive at `path` to the deployment's Postgres, where it does not have them.

    For a Postgres that was lost, or is older than its backups' log; no flusher may run meanwhile. `dry_run`: say what
    would be done, and roll back (the tables are made). Raises DataLoss when the archive has a gap or was changed,
    ConfigError when there is none, or when the deployment's log has positions that the archive has too, Unavailable
    errors.
    """
    from pyspark.sql import DataFrame

    began = time.perf_counter()
    manifests = manifests_of(spark, path)
    if not manifests:
        raise ConfigError(f"there is no archive at {path}")
    whole(manifests)
    report = RestoreReport(dry_run=dry_run)
    loop().run(_setup(deployment, manifests, dry_run=dry_run))
    tasks = tasks or int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    # One job for all ranges of one kind of subjects: a thread's entries in order, whatever range they are in.
    for subjects, ranges in groupby(manifests, key=lambda m: Subjects(m.subject, m.partitions)):
        parts = list(ranges)
        messages = reduce(DataFrame.union, [check_range(spark, path, manifest) for manifest in parts])
        if any(after.start < before.end for before, after in pairwise(parts)):  # two archived at the same time
            messages = messages.dropDuplicates(["position"])
        owned = messages.select("position", "subject", "header", "body").repartition(tasks, "subject")
        ordered = owned.sortWithinPartitions("subject", "position")
        with described(ordered, f"bufstore: restore {path}"):
            for found in ordered.mapInArrow(partial(_task, deployment, subjects, dry_run), _OUTCOME).collect():
                report.add(*found)
    report.seconds = round(time.perf_counter() - began, 3)
    return report


async def _setup(deployment: Deployment, manifests: Sequence[Manifest], *, dry_run: bool) -> None:
    found = await log_of(deployment)
    epoch = epoch_after(
        manifests, found.created if found is not None else None, found.epoch if found is not None else 0
    )
    async with _Restoring(deployment, dry_run=dry_run) as restoring:
        await restoring.setup(epoch)


def epoch_after(manifests: Sequence[Manifest], created: str | None, epoch: int) -> int:
    """The generation of the log that the restored rows go with; `created` and `epoch` are those of the log there is.

    A log that is made later must begin above every position that the rows name, or its entries would be taken for
    applied. Raises ConfigError when that cannot be, because there is one already.
    """
    newest = max(manifests, key=lambda m: m.end)
    if created is None:
        return newest.epoch + 1
    if created != newest.created and first_position(epoch) < newest.end:
        raise ConfigError(
            f"the deployment has a log (epoch {epoch}) whose positions the archive has too (epoch {newest.epoch}): its "
            "entries would be taken for applied. Restore where there is no log yet, or its generation is a later one"
        )
    return epoch


def _task(
    deployment: Deployment, subjects: Subjects, dry_run: bool, batches: Iterator[pyarrow.RecordBatch]
) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    report = loop().run(_restore(deployment, subjects, _threads(subjects, batches), dry_run=dry_run))
    schema = pyarrow.schema(
        [(name, pyarrow.int64()) for name in ("threads", "applied", "present", "refused")]
        + [("reasons", pyarrow.list_(pyarrow.string()))]
    )
    row = {name: getattr(report, name) for name in schema.names}
    yield pyarrow.RecordBatch.from_pylist([row], schema)


def _threads(subjects: Subjects, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[tuple[str, list[Item]]]:
    """The entries of one thread after the other; what belongs to none is left out."""
    subject: str | None = None
    messages: list[StoredMessage] = []
    for batch in batches:
        for row in batch.to_pylist():
            if row["subject"] != subject:
                if messages:
                    yield from _entries(subjects, messages)
                subject, messages = row["subject"], []
            messages.append(StoredMessage(row["subject"], row["position"], row["header"], row["body"] or b""))
    if messages:
        yield from _entries(subjects, messages)


def _entries(subjects: Subjects, messages: Sequence[StoredMessage]) -> Iterator[tuple[str, list[Item]]]:
    try:
        thread_id = subjects.thread_id(messages[0].subject)
    except MalformedEntry:
        return  # of no thread, or a barrier: a flush parks it or passes it
    if items := assemble(messages, thread_id):
        yield thread_id, list(items)


async def _restore(
    deployment: Deployment, subjects: Subjects, threads: Iterator[tuple[str, list[Item]]], *, dry_run: bool
) -> RestoreReport:
    report = RestoreReport()
    async with _Restoring(deployment, dry_run=dry_run) as restoring:
        part: dict[str, list[Item]] = {}
        size = 0
        for thread_id, items in threads:
            part[thread_id] = items
            size += len(items)
            if size >= _AT_ONCE:
                report.add(*await restoring.apply(part))
                part, size = {}, 0
        if part:
            report.add(*await restoring.apply(part))
    return report


class _RollBack(Exception):
    """Ends a transaction of a dry run."""


class _Restoring:
    """Applies entries to one database."""

    def __init__(self, deployment: Deployment, *, dry_run: bool) -> None:
        self._store = PostgresThreadStore(deployment.postgres, schema=deployment.schema, pool_size=1)
        self._ledger = PostgresLedger(deployment.postgres, self._store, schema=deployment.schema)
        self._dry_run = dry_run

    async def __aenter__(self) -> _Restoring:
        await self._store.open()
        await self._ledger.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ledger.aclose()
        await self._store.aclose()

    async def setup(self, epoch: int) -> None:
        """Make the tables; remember which generation of the log they belong to."""
        await self._store.setup()
        await self._ledger.setup()
        if not self._dry_run:
            await self._ledger.set_epoch(epoch)

    async def apply(self, threads: Mapping[str, Sequence[Item]]) -> tuple[int, int, int, int, list[str]]:
        """One transaction: threads, entries applied, present and refused, and why."""
        counts: tuple[int, int, int, int, list[str]] = (0, 0, 0, 0, [])

        def decide(rows: Mapping[str, Row]) -> Decision:
            nonlocal counts
            decision, counts = decided(rows, threads)
            if self._dry_run:
                raise _RollBack
            return decision

        try:
            await self._ledger.flush([], sorted(threads), decide)
        except _RollBack:
            pass
        except FlushFailed as e:
            raise StoreUnavailable(f"Postgres takes no restore now: {e}") from e
        return counts


def decided(
    rows: Mapping[str, Row], threads: Mapping[str, Sequence[Item]]
) -> tuple[Decision, tuple[int, int, int, int, list[str]]]:
    """What a restore writes of these entries, and the counts of `_Restoring.apply`."""
    batch: list[Any] = []
    after: dict[str, Row] = {}
    applied = present = refused = 0
    reasons: list[str] = []
    for thread_id, items in threads.items():
        row, poison = rows[thread_id], dict[int, str]()
        behind = [item for item in items if item.seq > row.flushed_seq]
        present += len(items) - len(behind)
        todo, change = decide_thread(thread_id, row, behind, poison, coalesce, complete=True)
        if todo.park:
            # Only up to the first that cannot be applied: a restore sets nothing aside.
            first = todo.park[0]
            refused += sum(item.seq >= first.item.seq for item in behind)
            reasons.append(
                f"thread {thread_id!r}, position {first.item.seq}: {_cause(first.item, first.cause, poison)}"
            )
            behind = [item for item in behind if item.seq < first.item.seq]
            todo, change = decide_thread(thread_id, row, behind, {}, coalesce, complete=True)
        if change is not None:
            batch.append(change)
            after[thread_id] = todo.row
            applied += len(todo.apply)
    return Decision(batch=batch, rows=after), (len(threads), applied, present, refused, reasons[:_SHOWN])


def _cause(item: Item, cause: str, poison: Mapping[int, str]) -> str:
    return cause if isinstance(item, Malformed) else poison.get(item.entry.id, cause)
