-- The last applied entry of the thread when this one was parked. While it still is the last, nothing has been applied
-- since, and this entry can be replayed. Existing rows get it if their thread has been broken since then; other threads
-- have gone on.
ALTER TABLE {schema}.buffer_quarantine ADD COLUMN base_id bigint;
UPDATE {schema}.buffer_quarantine AS q SET base_id = b.applied_id
FROM {schema}.buffer_threads AS b
WHERE b.thread_id = q.thread_id AND b.broken_since <= q.seq;

-- The position up to which an operator has discarded entries of the thread: that these are missing is no damage.
ALTER TABLE {schema}.buffer_threads ADD COLUMN given_up bigint NOT NULL DEFAULT 0;
