"""Threads, messages and runs as columns: a whole batch as a few binary arrays, which one statement unnests.

Measured for 2000 and 10000 messages of 2 KiB: 1.5 to 2 times faster than COPY into a temporary table and a merge,
and no table is made (and no catalog grows) per flush.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import msgspec
from psycopg.errors import UniqueViolation

from bufstore.postgres.connection.arrays import Array, blobs, chunks, ints, longs, row_bytes, texts
from bufstore.threads.model import RunStatus, Thread, ThreadChange, encoded_id


class _WithStatus(msgspec.Struct, gc=False):
    status: RunStatus = RunStatus.RUNNING


_status_of = msgspec.msgpack.Decoder(_WithStatus).decode


def id_hash(payload: bytes) -> int | None:
    """64 bits of the hash of an encoded message's id; None when it has no ``id`` that is a str.

    If two ids of a thread had one hash, an append would be refused: for 10,000 messages a chance of 1 in 10^15.
    """
    message_id = encoded_id(payload)
    return hash_of_id(message_id) if message_id is not None else None


def hash_of_id(message_id: str) -> int:
    """64 bits of the hash of a message's id."""
    return int.from_bytes(blake2b(message_id.encode(), digest_size=8).digest(), signed=True)


def thread_columns(changes: Sequence[ThreadChange]) -> tuple[Array, ...]:
    """The parameters of ``apply_threads``: `ThreadChange.project` for every thread, without reading its row.

    The first saved run that is not done decides the active and the open run, whatever they were before. Only
    where all saved runs are done does the row matter: the statement takes the runs off it.
    """
    threads = [change.project(Thread(thread_id=change.thread_id)) for change in changes]
    all_done = [c for c in changes if all(save.status is RunStatus.DONE for save in c.saves)]
    done = [(c.thread_id, save.run_id) for c in all_done for save in c.saves]
    return (
        texts(t.thread_id for t in threads),
        ints(t.version for t in threads),
        texts(t.parent_thread_id for t in threads),
        texts(t.latest_run_id for t in threads),
        texts(t.active_run_id for t in threads),
        texts(t.open_run_id for t in threads),
        blobs([c.metadata for c in changes]),
        texts(t.metadata.resource_id for t in threads),
        blobs([c.state for c in changes]),
        ints(_ranks([c.thread_seq for c in changes])),
        texts(c.thread_id for c in all_done),
        texts(thread_id for thread_id, _ in done),
        texts(run_id for _, run_id in done),
        texts(c.thread_id for c in changes if c.parent is not None),
    )


def _ranks(values: Sequence[int]) -> list[int]:
    """For each value, how many come before it."""
    ranks = [0] * len(values)
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        ranks[i] = rank
    return ranks


def message_columns(changes: Iterable[ThreadChange]) -> Iterator[tuple[Array, ...]]:
    """The parameters of ``apply_messages`` for each statement that it takes."""
    rows = (
        (change.thread_id, change.keep + i, payload) for change in changes for i, payload in enumerate(change.messages)
    )
    for thread_ids, seqs, payloads in chunks(rows, lambda row: len(row[0]) + len(row[2])):
        yield texts(thread_ids), ints(seqs), blobs(payloads), longs(id_hash(p) for p in payloads)


def run_columns(changes: Iterable[ThreadChange]) -> list[tuple[Array, ...]]:
    """The parameters of ``apply_runs`` for each statement that it takes, in the order of the runs' ids.

    Raises UniqueViolation when two threads of the batch have the same run id.
    """
    rows = sorted(
        (run_id, change.thread_id, record, change.run_seqs.get(run_id, 0))
        for change in changes
        for run_id, record in change.runs.items()
    )
    if len({row[0] for row in rows}) < len(rows):
        raise UniqueViolation("a run id belongs to another thread")
    ranks = _ranks([row[3] for row in rows])
    columns: list[tuple[Array, ...]] = []
    ranked = ((*row[:3], rank) for row, rank in zip(rows, ranks, strict=True))
    for run_ids, thread_ids, records, chunk_ranks in chunks(ranked, row_bytes):
        statuses = [_status_of(record).status.value for record in records]
        columns.append((texts(run_ids), texts(thread_ids), blobs(records), texts(statuses), ints(chunk_ranks)))
    return columns
