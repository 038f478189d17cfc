SELECT thread_id, given_up, flushed_seq, applied_id, version, ring, broken_since, gone, sources
FROM {schema}.buffer_threads WHERE thread_id = ANY ($1::text[])
