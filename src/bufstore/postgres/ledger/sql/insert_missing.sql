-- A row that does not exist cannot be locked: make it first. Sorted, so that two flushes never deadlock.
INSERT INTO {schema}.buffer_threads (thread_id, flushed_seq, applied_id, version, ring)
SELECT s.thread_id, 0, 0, 0, '' FROM unnest($1::text[]) AS s (thread_id) ORDER BY s.thread_id COLLATE "C"
ON CONFLICT DO NOTHING
