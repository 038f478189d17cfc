-- The chain is broken from the first entry that still waits on what is applied; with none, it is whole.
UPDATE {schema}.buffer_threads AS b SET broken_since = (
    SELECT min(q.seq) FROM {schema}.buffer_quarantine AS q
    WHERE q.thread_id = b.thread_id AND q.base_id = b.applied_id
)
WHERE b.thread_id = $1::text
