"""Folded operations as the parameters of the statements that write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bufstore.langgraph.folded import Folded
from bufstore.postgres.connection.arrays import Array, blobs, chunks, ints, row_bytes, texts


def parameters(batch: Sequence[Folded]) -> Iterator[tuple[str, Sequence[Array]]]:
    """Yield the statements that write the batch, in order, with their parameters.

    All rows are in the order of their keys, so that two batches lock in one order and never deadlock.
    """
    if deleted := [f.thread_id for f in batch if f.deleted]:
        yield "delete_threads", [texts(deleted)]
    for name, keys in (
        ("drop_namespaces", ((f.thread_id, ns) for f in batch for ns in f.dropped_namespaces)),
        ("drop_checkpoints", ((f.thread_id, *key) for f in batch for key in f.dropped)),
        ("drop_blobs", ((f.thread_id, *key) for f in batch for key in f.dropped_blobs)),
    ):
        if rows := sorted(keys):
            yield name, [texts(column) for column in zip(*rows, strict=True)]
    kept = (
        (f.thread_id, b.ns, b.channel, b.version, b.type, b.blob)
        for f in batch
        for _, b in sorted(f.rows.blobs.items())
    )
    for columns in chunks(kept, row_bytes):
        yield "put_blobs", [*map(texts, columns[:5]), blobs(columns[5])]
    put = (
        (f.thread_id, c.ns, c.id, c.parent, c.checkpoint, c.metadata)
        for f in batch
        for _, c in sorted(f.rows.checkpoints.items())
    )
    for columns in chunks(put, row_bytes):
        yield "put_checkpoints", [*map(texts, columns[:4]), *map(blobs, columns[4:])]
    for name, replaces in (("put_writes", False), ("replace_writes", True)):
        written = (
            (f.thread_id, w.ns, w.checkpoint_id, w.task_id, w.idx, w.channel, w.type, w.blob, w.task_path)
            for f in batch
            for key, w in sorted(f.rows.writes.items())
            if (key in f.replacing) is replaces
        )
        for columns in chunks(written, row_bytes):
            row, idx, names, blob, path = columns[:4], columns[4], columns[5:7], columns[7], columns[8]
            yield name, [*map(texts, row), ints(idx), *map(texts, names), blobs(blob), texts(path)]
