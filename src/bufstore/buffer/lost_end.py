"""Decides whether the end that a log has lost was flushed.

A server of one replica that lost the end of its file goes on behind what is missing, and so it does after a purge by
hand. A process that has seen what is gone asks Postgres. A cursor stands on an entry that was delivered, and everything
of its partition before it was delivered, too. So a cursor among the entries that were seen says all. One behind them
may have come there after they were lost; then the partition's last entry counts as flushed only if its thread remembers
it. It does not if the entry had a key and others have written to the thread since, or sixteen times, or if it deleted
the thread; nor can it be asked about an entry that the process no longer has in memory. Then the answer is no.
"""

from __future__ import annotations

from collections.abc import Mapping

from bufstore.buffer import recent_keys
from bufstore.buffer.chain import Watermark
from bufstore.buffer.entry import entry_id
from bufstore.buffer.ports.ledger import Cursor, Ledger
from bufstore.buffer.ports.log import Ending
from bufstore.buffer.subjects import Subjects
from bufstore.jetstream.messages import StoredMessage


async def all_flushed(ledger: Ledger, subjects: Subjects, endings: Mapping[int, Ending], seen: int) -> bool:
    """Return whether Postgres certainly has the partitions' entries up to these. `seen`: no position is above it.

    Raises StoreUnavailable.
    """
    cursors = await ledger.cursors()
    for partition, ending in endings.items():
        passed = has_passed(cursors.get(partition), ending.seq, seen)
        if passed is None and ending.entry is not None:
            thread_id = subjects.thread_of(ending.entry.subject)
            passed = thread_id is not None and remembers(
                await ledger.watermark(thread_id), ending.seq, ending.entry, seen
            )
        if not passed:
            return False
    return True


def has_passed(cursor: Cursor | None, seq: int, seen: int) -> bool | None:
    """Return whether a partition is flushed up to this entry; None: the cursor does not say.

    `seen`: a position that the entry is not above, and before which nothing is stored any more.
    """
    if cursor is None or cursor.seq < seq:
        return False
    return True if cursor.seq <= seen else None


def remembers(watermark: Watermark, seq: int, entry: StoredMessage, seen: int) -> bool:
    """Return whether a thread certainly has this entry, applied, parked or waiting, at this position.

    A key of the caller's own proves nothing: somebody may have repeated a write that was lost.
    """
    reached = max(watermark.flushed_seq, watermark.waits_to)
    if reached <= seen:
        return reached >= seq
    id_ = entry_id(entry)
    return id_ != 0 and (watermark.applied_id == id_ or recent_keys.holds(watermark.keys, recent_keys.item_of(id_)))
