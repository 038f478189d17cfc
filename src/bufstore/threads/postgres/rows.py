"""Rows of the threads' tables, read."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.threads.model import NO_METADATA, Thread, decode_metadata


class ThreadRows(msgspec.Struct, frozen=True, kw_only=True):
    """What Postgres holds of a thread, of one moment, still encoded."""

    #: None when the thread has no row (and only a watermark).
    thread: Thread | None
    messages: list[bytes]
    latest_run: bytes | None
    state: bytes | None
    #: None when it was not asked for, or the buffer knows nothing of the thread.
    watermark: Watermark | None


def thread_of(thread_id: str, row: Sequence[Any]) -> Thread:
    """The thread of a row's columns: version, parent, latest, active and open run, metadata."""
    version, parent, latest, active, opened, metadata = row
    return Thread(
        thread_id=thread_id,
        version=version,
        parent_thread_id=parent,
        latest_run_id=latest,
        active_run_id=active,
        open_run_id=opened,
        metadata=NO_METADATA if metadata is None else decode_metadata(metadata),
    )


def thread_rows(thread_id: str, rows: Sequence[Sequence[Any]]) -> ThreadRows | None:
    """What ``load_rows`` has read; None when Postgres knows nothing of the thread."""
    first, *messages = sorted(rows, key=itemgetter(0))
    latest_run, version = first[1:3]
    watermark = Watermark(*[*first[9:14], False, first[14]]) if first[9] is not None else None
    if waits_to := first[15]:
        row = watermark or Watermark(version=version or 0)
        watermark = msgspec.structs.replace(row, waits_to=waits_to)
    if version is None and watermark is None:
        return None
    return ThreadRows(
        thread=None if version is None else thread_of(thread_id, first[2:8]),
        messages=[row[1] for row in messages],
        latest_run=latest_run,
        state=first[8],
        watermark=watermark,
    )
