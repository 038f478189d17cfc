"""Takes the entries out of archived messages, thread by thread and in order, with the parts of large ones.

Archives of earlier versions hold entries as messages of their threads; one archive may hold these and groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow

from bufstore.buffer.entry import Item, Malformed, item_of
from bufstore.buffer.groups.oversize import parsed, whole
from bufstore.buffer.subjects import Subjects
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import StoredMessage
from bufstore.spark.group_entries import EntryMessage, entries_of
from bufstore.spark.slices import slices_of
from bufstore.spark.source.log_columns import BYTES, NUMBER, TEXT, TIME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROWS_AT_ONCE = 64
_BYTES_AT_ONCE = 16 << 20
_COLUMNS = {"subject": TEXT, "position": NUMBER, "stored_at": TIME, "header": TEXT, "body": BYTES}
_ENTRIES = pyarrow.schema([*_COLUMNS.items(), ("parts", pyarrow.list_(NUMBER))])
#: The columns of the entries' pieces. `part` is null when the entry is in one piece.
PIECES = pyarrow.schema([*_COLUMNS.items(), ("number", pyarrow.int32()), ("part", NUMBER), ("part_body", BYTES)])


def pieces_of(messages: DataFrame, subjects: Subjects, named: Subjects) -> DataFrame:
    """Return the entries in these messages (with all columns of an archive); each part of a large one has a row.

    Parts may be in an earlier range than their group, so this needs all ranges at once that have these subjects. The
    entries come out under the subjects `named`.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_schema

    entries = messages.mapInArrow(partial(_entries, subjects, named), from_arrow_schema(_ENTRIES))
    pieces = entries.select("*", F.posexplode_outer("parts").alias("number", "part"))
    columns, none = PIECES.names[:-1], F.lit(None).cast("binary").alias("part_body")
    stored = messages.where(F.col("subject") == subjects.parts)
    if stored.isEmpty():
        return pieces.select(*columns, none)
    bodies = stored.select(F.col("position").alias("part"), F.col("body").alias("part_body"))
    # Join only pieces that have a part: a join of all would send all pieces that have none to one task.
    large = pieces.where("part IS NOT NULL").join(bodies, "part", "left").select(*columns, "part_body")
    return pieces.where("part IS NULL").select(*columns, none).union(large)


def _entries(
    subjects: Subjects, named: Subjects, batches: Iterator[pyarrow.RecordBatch]
) -> Iterator[pyarrow.RecordBatch]:
    for messages in _few(batches):
        rows = [row for message in messages for row in _rows(subjects, message)]
        if named != subjects:
            for row in rows:
                if (thread_id := subjects.thread_of(row["subject"])) is not None:
                    row["subject"] = named.of(thread_id)
        yield pyarrow.RecordBatch.from_pylist(rows, _ENTRIES)


def _few(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[list[dict[str, Any]]]:
    """Yield rows, a few at a time: a copy of a whole batch takes time and memory."""
    for batch in batches:
        at = batch.schema.get_field_index("stored_at")
        # Python may not know the session's zone.
        batch = batch.set_column(at, "stored_at", batch.column(at).cast(TIME))
        for at in range(0, batch.num_rows, _ROWS_AT_ONCE):
            for piece in slices_of(batch.slice(at, _ROWS_AT_ONCE), _BYTES_AT_ONCE):
                yield piece.to_pylist()


def _rows(subjects: Subjects, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    subject, body = message["subject"], message["body"] or b""
    if subject == subjects.parts:
        return
    if subject != subjects.groups:  # an entry of an earlier version, or anything else
        yield message | {"body": body, "parts": None}
        return
    for _, what in entries_of(StoredMessage(subject, message["position"], message["header"], body), subjects):
        if isinstance(what, EntryMessage):  # nobody knows which thread a damaged entry belongs to
            stored = what.message
            yield {
                "subject": stored.subject,
                "position": stored.seq,
                "stored_at": message["stored_at"],
                "header": stored.header,
                "body": stored.body,
                "parts": _parts(stored.body) if what.elsewhere else None,
            }


def _parts(reference: bytes) -> list[int] | None:
    try:
        return parsed(reference).parts
    except MalformedEntry:
        return None  # the entry's own checksum will tell


def threads_of(subjects: Subjects, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[tuple[str, Iterator[Item]]]:
    """Yield one thread after the other, with its entries, from pieces sorted by subject, position and number.

    Pieces that belong to no thread are left out. Take a thread's entries before you take the next thread.
    """
    for thread_id, rows in rows_of(subjects, batches):
        yield thread_id, (item for item, _ in items_of_rows(thread_id, rows))


def rows_of(
    subjects: Subjects, batches: Iterator[pyarrow.RecordBatch]
) -> Iterator[tuple[str, Iterator[dict[str, Any]]]]:
    """Yield the same threads as `threads_of`, with the rows of their pieces."""
    rows = chain.from_iterable(_few(batches))
    for subject, found in groupby(rows, key=itemgetter("subject")):
        try:
            thread_id = subjects.thread_id(subject)
        except MalformedEntry:
            continue  # garbage: a flush passes over it
        yield thread_id, found


def items_of_rows(thread_id: str, rows: Iterator[dict[str, Any]]) -> Iterator[tuple[Item, datetime]]:
    """Yield a thread's entries, and when each was stored."""
    begun = False
    for position, found in groupby(rows, key=itemgetter("position")):
        pieces = list(found)
        message = StoredMessage(pieces[0]["subject"], position, pieces[0]["header"], pieces[0]["body"] or b"")
        cut = False
        made: Item
        try:
            if pieces[0]["part"] is not None:
                cut = any(piece["part_body"] is None for piece in pieces)
                message = StoredMessage(message.subject, position, message.header, _payload(message.body, pieces))
            made = item_of(message, thread_id)
        except MalformedEntry as e:
            made = Malformed(message.subject, position, (message,), str(e), thread_id)
        # The rest of an entry that began before the archive is no entry any more.
        if begun or not cut:
            begun = True
            yield made, pieces[0]["stored_at"]


def _payload(reference: bytes, pieces: Sequence[dict[str, Any]]) -> bytes:
    for piece in pieces:
        if piece["part_body"] is None:
            raise MalformedEntry(f"part {piece['part']} of a large entry is not in the archive")
    return whole(reference, [piece["part_body"] for piece in pieces])
