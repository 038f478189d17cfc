"""Overlays threads of which the log holds more than Postgres has, as a read of the store does; no I/O.

Only the number of a thread's messages in Postgres is needed: an entry keeps some of them, from the first on, and
replaces the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from bufstore.buffer.entry import Item
from bufstore.buffer.read.overlay import overlay
from bufstore.spark.source.log_columns import payload_of
from bufstore.threads.domain import THREADS
from bufstore.threads.payload import Edit, Payload
from bufstore.threads.postgres.rows import thread_state
from bufstore.threads.state import ThreadState

#: Stands for a message that is as Postgres has it. An encoded message is never empty.
_STORED = b""


class Late(msgspec.Struct, frozen=True):
    """An entry that is not flushed, and when it was stored, in microseconds since 1970."""

    item: Item
    stored_at: int


class Overlaid(msgspec.Struct, frozen=True):
    """A thread with its entries that are not flushed."""

    state: ThreadState
    #: When the last of these entries was stored, and, per run, the last one that saved it: microseconds since 1970.
    changed_at: int
    run_times: Mapping[str, int]

    @property
    def kept(self) -> int:
        """How many messages are as Postgres has them: the first ones."""
        messages = self.state.messages
        return next((n for n, message in enumerate(messages) if message is not _STORED), len(messages))

    def new_messages(self) -> Iterator[tuple[int, bytes]]:
        """Return the other messages, each with its number."""
        kept = self.kept
        return ((n, message) for n, message in enumerate(self.state.messages[kept:], kept))


def overlaid(thread_id: str, row: Sequence[Any], waiting: Sequence[Late], tail: Sequence[Late]) -> Overlaid | None:
    """Return the thread with its entries that wait in Postgres, and then those of the log; None: all are flushed.

    `row`: what ``thread_row_v2`` returns for the thread.
    """
    stored = ((number, _STORED) for number in range(row[1] or 0))
    state = thread_state(thread_id, [(-1, *row), *stored])
    late = [one for one in (*waiting, *tail) if one.item.seq > state.watermark.flushed_seq]
    if not late:
        return None
    # One after the other, as in `bufstore.buffer.read.with_waiting`.
    for some in (waiting, tail):
        if some:
            state = overlay(THREADS, state, thread_id, [one.item for one in some])
    return Overlaid(state, max(one.stored_at for one in late), _run_times(late))


def _run_times(late: Sequence[Late]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in late:
        payload = payload_of(one.item)
        if isinstance(payload, Payload):
            found[payload.save.run_id] = one.stored_at
        elif isinstance(payload, Edit) and payload.run_id is not None:
            found[payload.run_id] = one.stored_at
    return found
