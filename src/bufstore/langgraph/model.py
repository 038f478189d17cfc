"""The rows of LangGraph's tables, and the rows of one thread as a whole.

A row is exactly what LangGraph's own saver for Postgres stores. `Tables` holds rows of one thread and knows what each
operation makes of them: the store in memory, a read of the tail, and the tests all use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

#: The channel of what tasks send to others. A checkpoint before version 4 takes it from its parent's writes.
TASKS = "__pregel_tasks"


#: About how many bytes a row takes beside its values: its ids, and Python's objects.
_ROW_BYTES = 300


class CheckpointRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row of ``checkpoints``."""

    ns: str
    id: str
    parent: str | None
    #: JSON.
    checkpoint: bytes
    metadata: bytes

    @property
    def key(self) -> CheckpointKey:
        return self.ns, self.id


class BlobRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row of ``checkpoint_blobs``: a channel's value in one version."""

    ns: str
    channel: str
    version: str
    type: str
    blob: bytes | None

    @property
    def key(self) -> BlobKey:
        return self.ns, self.channel, self.version


class WriteRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row of ``checkpoint_writes``: what a task has written on top of a checkpoint."""

    ns: str
    checkpoint_id: str
    task_id: str
    idx: int
    channel: str
    type: str
    blob: bytes
    task_path: str

    @property
    def key(self) -> WriteKey:
        return self.ns, self.checkpoint_id, self.task_id, self.idx

    @property
    def order(self) -> tuple[str, str, int]:
        """The order in which a checkpoint's writes take effect."""
        return self.task_path, self.task_id, self.idx


#: The keys of rows: namespace and id; namespace, channel and version; namespace, checkpoint's id, task and index.
CheckpointKey = tuple[str, str]
BlobKey = tuple[str, str, str]
WriteKey = tuple[str, str, str, int]


class Put(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag="put"):
    """A checkpoint is saved, with the channels that have changed. New fields are appended with defaults."""

    checkpoint: CheckpointRow
    blobs: Sequence[BlobRow] = ()
    #: Channels (with their versions) that hold no value, or none that has a blob.
    empty: Sequence[tuple[str, str]] = ()
    #: Channels (with their versions) of which no value was given: as far as this operation tells, they hold none.
    untold: Sequence[tuple[str, str]] = ()


class Writes(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag="writes"):
    """What a task has written. `upsert`: a later write of the same index wins, not the first."""

    rows: Sequence[WriteRow]
    upsert: bool = False


class Delete(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag="delete"):
    """The whole thread is deleted."""


class Drop(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag="drop"):
    """Named rows are deleted: checkpoints with their writes, whole namespaces, blobs that nothing names any more."""

    checkpoints: Sequence[CheckpointKey] = ()
    namespaces: Sequence[str] = ()
    blobs: Sequence[BlobKey] = ()


class Rows(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag="rows"):
    """Rows are copied from another thread. One or more of these copy a whole thread."""

    checkpoints: Sequence[CheckpointRow] = ()
    blobs: Sequence[BlobRow] = ()
    writes: Sequence[WriteRow] = ()


Operation = Put | Writes | Delete | Drop | Rows


class LangGraphChange(msgspec.Struct, frozen=True):
    """What a flush writes of one thread: its operations, each with its position in the log."""

    thread_id: str
    operations: tuple[tuple[int, Operation], ...]

    @property
    def gone(self) -> bool:
        """Whether nothing of the thread is left after the change."""
        return isinstance(self.operations[-1][1], Delete)

    @property
    def whole(self) -> bool:
        """False: there is no operation that replaces a thread's rows."""
        return False


class Tables:
    """Rows of one thread: all of them, or those that a read asked for."""

    def __init__(self) -> None:
        self.checkpoints: dict[CheckpointKey, CheckpointRow] = {}
        self.blobs: dict[BlobKey, BlobRow] = {}
        self.writes: dict[WriteKey, WriteRow] = {}
        #: If these are only some of a thread's rows: the blobs of which it is known whether they are there.
        self.known: set[BlobKey] = set()
        #: Blobs that are not there unless the store has them: see `Put.untold`.
        self.untold: set[BlobKey] = set()
        #: Whether rows were dropped. If so, and this is a part of a thread, checkpoints outside it may be the newest.
        self.dropped = False

    def add(
        self,
        checkpoints: Iterable[CheckpointRow] = (),
        blobs: Iterable[BlobRow] = (),
        writes: Iterable[WriteRow] = (),
    ) -> None:
        """Add rows that are not there."""
        for row in checkpoints:
            self.checkpoints[row.key] = row
            self.known |= versions_of(row)
        self.blobs |= {blob.key: blob for blob in blobs}
        self.writes |= {write.key: write for write in writes}

    def copy(self) -> Tables:
        """Return the same rows, which can be changed without these."""
        same = Tables()
        same.checkpoints, same.blobs, same.writes = dict(self.checkpoints), dict(self.blobs), dict(self.writes)
        same.known, same.untold, same.dropped = set(self.known), set(self.untold), self.dropped
        return same

    def apply(self, operation: Operation) -> None:
        """Do what Postgres does when the operation is written there."""
        match operation:
            case Put(row, blobs, empty, untold):
                self._put(row)
                self._keep_blobs(blobs)
                if empty:
                    self.known |= {(row.ns, channel, version) for channel, version in empty}
                if untold:
                    self.untold |= {(row.ns, channel, version) for channel, version in untold}
            case Writes(rows, upsert):
                for write in rows:
                    self._write(write, upsert)
            case Rows(checkpoints, blobs, writes):
                for row in checkpoints:
                    self._put(row)
                self._keep_blobs(blobs)
                for write in writes:
                    self._write(write, False)
            case Delete():
                self.checkpoints, self.blobs, self.writes = {}, {}, {}
                self.known, self.untold, self.dropped = set(), set(), False
            case Drop():
                self._drop(operation)

    def _put(self, row: CheckpointRow) -> None:
        # A checkpoint that is there already keeps its parent. It is the last one from now on.
        key = row.key
        before = self.checkpoints.pop(key, None)
        self.checkpoints[key] = row if before is None else msgspec.structs.replace(row, parent=before.parent)

    def _keep_blobs(self, blobs: Iterable[BlobRow]) -> None:
        for blob in blobs:
            key = blob.key
            self.blobs.setdefault(key, blob)
            self.known.add(key)

    def _write(self, write: WriteRow, upsert: bool) -> None:
        key = write.key
        before = self.writes.setdefault(key, write)
        if upsert and before is not write:
            self.writes[key] = msgspec.structs.replace(write, task_path=before.task_path)

    def _drop(self, drop: Drop) -> None:
        gone, namespaces, blobs = set(drop.checkpoints), set(drop.namespaces), set(drop.blobs)
        self.checkpoints = {
            key: orphaned(row, gone)
            for key, row in self.checkpoints.items()
            if key not in gone and key[0] not in namespaces
        }
        self.blobs = {k: b for k, b in self.blobs.items() if k not in blobs and k[0] not in namespaces}
        self.writes = {k: w for k, w in self.writes.items() if k[:2] not in gone and k[0] not in namespaces}
        self.dropped = True

    @property
    def size(self) -> int:
        """About how many bytes the rows take."""
        rows = sum(len(c.checkpoint) + len(c.metadata) for c in self.checkpoints.values())
        blobs = sum(len(b.blob or b"") for b in self.blobs.values())
        objects = len(self.checkpoints) + len(self.blobs) + len(self.writes) + len(self.known)
        return 500 + _ROW_BYTES * objects + rows + blobs + sum(len(w.blob) for w in self.writes.values())

    def value(self, key: BlobKey) -> BlobRow | None:
        """Return a blob that has a value; None if it is not among these rows."""
        blob = self.blobs.get(key)
        return blob if blob is not None and blob.blob is not None else None

    def latest(self, ns: str) -> CheckpointRow | None:
        """The namespace's newest checkpoint."""
        newest = max((key for key in self.checkpoints if key[0] == ns), default=None)
        return self.checkpoints[newest] if newest is not None else None

    def writes_of(self, ns: str, checkpoint_id: str) -> list[WriteRow]:
        """A checkpoint's writes in the order in which they take effect."""
        found = [w for key, w in self.writes.items() if key[:2] == (ns, checkpoint_id)]
        return sorted(found, key=lambda w: w.order)


def orphaned(row: CheckpointRow, gone: set[CheckpointKey]) -> CheckpointRow:
    """Return the row, without a parent that is gone."""
    lost = row.parent is not None and (row.ns, row.parent) in gone
    return msgspec.structs.replace(row, parent=None) if lost else row


class _Versions(msgspec.Struct):
    channel_versions: dict[str, Any] | None = None
    v: int = 0


_versions = msgspec.json.Decoder(_Versions).decode


def versions_of(row: CheckpointRow) -> set[BlobKey]:
    """Return the keys of the blobs that a checkpoint names, whether they are there or not."""
    versions = _versions(row.checkpoint).channel_versions or {}
    return {(row.ns, channel, str(version)) for channel, version in versions.items()}


def is_old(row: CheckpointRow) -> bool:
    """Whether the checkpoint is of a version that takes what was sent to it from its parent's writes."""
    return _versions(row.checkpoint).v < 4


def takes_sends(row: CheckpointRow) -> bool:
    """Whether the checkpoint is of an old version and has a parent to take from what was sent to it."""
    return row.parent is not None and is_old(row)
