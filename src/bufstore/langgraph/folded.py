"""Many operations of a thread as the fewest rows that have the same effect: what a flush sends to Postgres."""

from __future__ import annotations

from collections.abc import Iterable

from bufstore.langgraph.model import (
    BlobKey,
    BlobRow,
    CheckpointKey,
    CheckpointRow,
    Delete,
    Drop,
    Operation,
    Put,
    Rows,
    Tables,
    WriteKey,
    WriteRow,
    Writes,
    left_by,
    merged,
    put,
)


class Folded:
    """The effect of a thread's operations, in the order in which Postgres gets it: deletions first, then rows.

    Each key has one row: a statement that inserts or updates cannot touch a row twice.
    """

    def __init__(self, thread_id: str, operations: Iterable[Operation]) -> None:
        self.thread_id = thread_id
        #: Whether the whole thread, as it was before, is deleted.
        self.deleted = False
        self._clear()
        for operation in operations:
            self._fold(operation)

    def _clear(self) -> None:
        self.dropped: set[CheckpointKey] = set()
        self.dropped_namespaces: set[str] = set()
        self.dropped_blobs: set[BlobKey] = set()
        self.checkpoints: dict[CheckpointKey, CheckpointRow] = {}
        self.blobs: dict[BlobKey, BlobRow] = {}
        #: The checkpoints that were copied from another thread.
        self.copied: set[CheckpointKey] = set()
        #: The row of each key, and whether it replaces one that is there.
        self.writes: dict[WriteKey, tuple[WriteRow, bool]] = {}

    def written(self, tables: Tables) -> Tables:
        """Return what the statements of a flush make of the thread's tables: deletions first, then rows."""
        after = Tables() if self.deleted else tables.copy()
        after.apply(Drop(sorted(self.dropped), sorted(self.dropped_namespaces), sorted(self.dropped_blobs)))
        after.blobs = {**self.blobs, **after.blobs}
        for row in self.checkpoints.values():
            after.apply(Put(row))
        for write, upsert in self.writes.values():
            after.apply(Writes([write], upsert))
        return after

    def _fold(self, operation: Operation) -> None:
        match operation:
            case Put(row, blobs, _):
                self._put(row)
                self._keep_blobs(blobs)
            case Writes(rows, upsert):
                for write in rows:
                    self._write(write, upsert)
            case Rows(checkpoints, blobs, writes):
                for row in checkpoints:
                    self._put(row)
                    self.copied.add((row.ns, row.id))
                self._keep_blobs(blobs)
                for write in writes:
                    self._write(write, False)
            case Delete():
                self._clear()
                self.deleted = True
            case Drop():
                self._drop(operation)

    def _put(self, row: CheckpointRow) -> None:
        put(self.checkpoints, row)

    def _keep_blobs(self, blobs: Iterable[BlobRow]) -> None:
        for blob in blobs:
            self.blobs.setdefault(blob.key, blob)

    def _write(self, write: WriteRow, upsert: bool) -> None:
        key = write.ns, write.checkpoint_id, write.task_id, write.idx
        before = self.writes.get(key)
        if before is None:
            self.writes[key] = write, upsert
        else:
            self.writes[key] = merged(before[0], write, upsert), before[1] or upsert

    def _drop(self, drop: Drop) -> None:
        self.dropped |= set(drop.checkpoints)
        self.dropped_namespaces |= set(drop.namespaces)
        self.dropped_blobs |= set(drop.blobs)
        self.checkpoints, self.blobs, self.writes = left_by(drop, self.checkpoints, self.blobs, self.writes)
