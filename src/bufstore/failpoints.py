"""Where a process may die, by name: a crash test kills it exactly there.

A *failpoint* stands between two steps that outlive the process (a message in the log or the bucket, a transaction, a
consumer, a purge): a change in memory alone would make no difference to the next process. Each member of
`Failpoint` is reached from one place in the source, by moving parts and adapters, never by decisions.

Off unless a test sets `active` in its own process; no configuration does. Off, a failpoint costs one call and one look
at a module's variable, some 60 ns, beside steps that take at least tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Failpoint(StrEnum):
    """Every crash point. Each comment says where it stands and what a crash there would cost in a wrong design."""

    # Writing.
    #: Before a run's id is claimed. Nothing is stored; the retry must not find the id taken.
    CLAIM_BEFORE = "claim-before"
    #: The claim is stored, its checkpoint is not sent. The run's own thread must get the id again.
    CLAIM_STORED = "claim-stored"
    #: Before a group of entries, or a part of a large one, is sent. Nothing of it is stored.
    PUBLISH_BEFORE = "publish-before"
    #: The group is stored, nobody has been told. A retry with an entry's key must find it, not store it twice.
    PUBLISH_ACKED = "publish-acked"
    #: The parts of a large entry are stored, the group that names them is not. Parts alone must count for nothing.
    PARTS_STORED = "parts-stored"
    #: The thread's lane knows of the ack; the caller does not have its receipt.
    RECEIPT_BEFORE = "receipt-before"

    # Flushing.
    #: The flush of a window is decided. Nothing has changed.
    FLUSH_BEFORE = "flush-before"
    #: In the transaction: rows are locked (missing ones inserted). Locks must go with the session.
    FLUSH_LOCKED = "flush-locked"
    #: In the transaction: changes are applied, watermarks are not. Committed alone they would be applied twice.
    FLUSH_APPLIED = "flush-applied"
    #: In the transaction: all is written, nothing is committed. The entries must be delivered again.
    FLUSH_ADVANCED = "flush-advanced"
    #: The flush is committed, its progress report is not sent. Waiters must find out from Postgres.
    FLUSH_COMMITTED = "flush-committed"
    #: The flush is reported, its entries are not acked. What is delivered again must change nothing.
    FLUSH_REPORTED = "flush-reported"
    #: The entries are acked. The floor must not be ahead of the cursor.
    FLUSH_ACKED = "flush-acked"
    #: The cursors of idle partitions are moved, nobody has been told. They must not have passed an entry of theirs.
    IDLE_MOVED = "idle-moved"
    #: The first half of a window that had to be split is committed. The cursor must not pass the other half.
    FLUSH_HALF_SETTLED = "flush-half-settled"

    # Threads that wait.
    #: In a transaction: entries wait in the ledger, the cursor has not passed them. Else they would wait twice.
    QUEUE_WRITTEN = "queue-written"
    #: The cursor has passed entries that wait. The next owner must find them, and put later ones behind them.
    QUEUE_COMMITTED = "queue-committed"
    #: In a flush transaction: what waited is applied and waits no more; the watermark does not say so yet.
    QUEUE_LEFT = "queue-left"

    # Taking partitions, giving them up.
    #: A member's lease is stored, the others have not been told. Its partitions wait until it runs out.
    LEASE_RENEWED = "lease-renewed"
    #: Terms are raised in Postgres, nobody follows the log. The earlier owner is fenced: the next must take over.
    TAKE_RAISED = "take-raised"
    #: The new consumer is there, nobody reads from it.
    TAKE_NEW_MADE = "take-new-made"
    #: A partition's memory is given up, its consumer is still there.
    SHARE_DROPPED = "share-dropped"

    # Purging.
    #: Before the purge of what was flushed long enough ago.
    PURGE_BEFORE = "purge-before"
    #: The log is purged, this process has not noted it. The entry at the cursor must have stayed.
    PURGE_DONE = "purge-done"

    # Quarantine.
    #: In the flush transaction: entries are parked, the cursor has not passed them. Else they are parked twice or lost.
    PARK_WRITTEN = "park-written"
    #: In a replay's transaction: the entry is applied, its row in quarantine is still there. Else it is applied twice.
    REPLAY_APPLIED = "replay-applied"
    #: In a replay's transaction: all is written, nothing is committed. Else the entry is lost from both.
    REPLAY_SETTLED = "replay-settled"
    #: A replay is committed, writers have not been told. They must notice that the chain has changed.
    REPLAY_COMMITTED = "replay-committed"
    #: In a discard's transaction: the row is gone, the thread's row does not say so yet.
    DISCARD_WRITTEN = "discard-written"
    #: A discard is committed, writers have not been told.
    DISCARD_COMMITTED = "discard-committed"

    # Changes of lineage, deletions.
    #: The change is checked; it has no place among the others yet. Nothing has changed.
    LINEAGE_BEFORE = "lineage-before"
    #: The record is stored, nothing of it is carried out. The next change must carry it out.
    LINEAGE_PLACED = "lineage-placed"
    #: One edit of several is in the log. The next change must do the rest, and repeat this one without harm.
    LINEAGE_EDITED = "lineage-edited"
    #: All edits are in the log, the record is not marked. Repeated, they must not touch what was created again since.
    LINEAGE_CARRIED_OUT = "lineage-carried-out"
    #: The record is marked, the caller has not been told.
    LINEAGE_MARKED = "lineage-marked"

    # Starting.
    #: In a migration's transaction: tables are changed, the version is not written. Else the migration would run twice.
    MIGRATION_HALF = "migration-half"
    #: One set of tables is migrated, another may not have begun.
    MIGRATION_DONE = "migration-done"
    #: Postgres knows the epoch, the stream does not exist. That must not be taken for a stream that was lost.
    EPOCH_SET = "epoch-set"
    #: The stream exists, the bucket may not.
    STREAM_CREATED = "stream-created"
    #: Stream and bucket exist, nothing runs.
    BUCKET_CREATED = "bucket-created"

    # Closing.
    #: Writes on their way have ended; what they stored is not flushed.
    CLOSE_DRAINED = "close-drained"
    #: Everything is flushed, and everything is still open.
    CLOSE_FLUSHED = "close-flushed"
    #: Partitions are given up, the member is still listed.
    CLOSE_GIVEN_UP = "close-given-up"
    #: The member has left, connections are open.
    CLOSE_LEFT = "close-left"


#: Called with each failpoint that is reached; set by a test, in the process that it will kill.
active: Callable[[Failpoint], None] | None = None


def reach(point: Failpoint) -> None:
    """Tell a test, if one listens, that the process has reached this point."""
    if active is not None:
        active(point)
