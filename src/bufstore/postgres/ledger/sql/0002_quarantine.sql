-- What the thread's chain stood on when the entry was parked: as long as that is so, nothing was applied since and the
-- entry can still be replayed. Of rows from before: the same for threads that are broken since; the others have gone on.
ALTER TABLE {schema}.buffer_quarantine ADD COLUMN base_id bigint;
UPDATE {schema}.buffer_quarantine AS q SET base_id = b.applied_id
FROM {schema}.buffer_threads AS b
WHERE b.thread_id = q.thread_id AND b.broken_since <= q.seq;

-- Up to where an operator has discarded entries of the thread: what they lack is no damage.
ALTER TABLE {schema}.buffer_threads ADD COLUMN given_up bigint NOT NULL DEFAULT 0;
