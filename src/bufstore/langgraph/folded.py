"""Many operations of a thread as the fewest rows that have the same effect: what a flush sends to Postgres."""

from __future__ import annotations

from collections.abc import Iterable

from bufstore.langgraph.model import (
    BlobKey,
    CheckpointKey,
    Delete,
    Drop,
    Operation,
    Rows,
    Tables,
    WriteKey,
    Writes,
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
        #: What the operations make of a thread without rows.
        self.rows = Tables()
        #: The checkpoints that were copied from another thread.
        self.copied: set[CheckpointKey] = set()
        #: The writes that replace one that is there.
        self.replacing: set[WriteKey] = set()

    def _fold(self, operation: Operation) -> None:
        if isinstance(operation, Delete):
            self._clear()
            self.deleted = True
            return
        self.rows.apply(operation)
        if isinstance(operation, Writes):
            if operation.upsert:
                self.replacing |= {write.key for write in operation.rows}
        elif isinstance(operation, Rows):
            self.copied |= {row.key for row in operation.checkpoints}
        elif isinstance(operation, Drop):
            self.dropped |= set(operation.checkpoints)
            self.dropped_namespaces |= set(operation.namespaces)
            self.dropped_blobs |= set(operation.blobs)
            self.replacing &= self.rows.writes.keys()

    def written(self, tables: Tables) -> Tables:
        """Return what the statements of a flush make of the thread's tables: deletions first, then rows."""
        after = Tables() if self.deleted else tables.copy()
        after.apply(Drop(sorted(self.dropped), sorted(self.dropped_namespaces), sorted(self.dropped_blobs)))
        after.apply(Rows(list(self.rows.checkpoints.values()), list(self.rows.blobs.values())))
        for key, write in self.rows.writes.items():
            after.apply(Writes([write], key in self.replacing))
        return after
