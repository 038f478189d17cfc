-- What somebody else holds is left out, and not waited for: its threads wait, the others do not.
SELECT thread_id, flushed_seq, applied_id, version, ring, broken_since, gone, sources
FROM {schema}.buffer_threads WHERE thread_id = ANY ($1::text[]) ORDER BY thread_id FOR UPDATE SKIP LOCKED
