"""Reads the rows of the threads' tables."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.threads.model import NO_METADATA, Thread, decode_metadata
from bufstore.threads.state import ThreadState


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


def thread_state(thread_id: str, rows: Sequence[Sequence[Any]]) -> ThreadState:
    """Make a state of the rows of ``load_state``. Without a buffer's row, the watermark has only the message count."""
    first, *messages = sorted(rows, key=itemgetter(0))
    latest_run, version = first[1:3]
    watermark = Watermark(version=len(messages))
    if first[9] is not None:
        # A buffer's row without a thread is what is left of a deleted thread.
        gone = version is None and bool(first[10])
        watermark = Watermark(*[*first[9:14], gone, first[14]])
        if not watermark.applied_id:  # the messages, if there are any, are from before the buffer
            watermark = msgspec.structs.replace(watermark, version=len(messages))
    if waits_to := first[15]:
        watermark = msgspec.structs.replace(watermark, waits_to=waits_to)
    return ThreadState(
        watermark=watermark,
        thread=None if version is None else thread_of(thread_id, first[2:8]),
        messages=[row[1] for row in messages],
        latest_run=latest_run,
        state=first[8],
    )
