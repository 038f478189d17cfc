SELECT flushed_seq, applied_id, version, ring, broken_since, gone, sources
FROM {schema}.buffer_threads WHERE thread_id = $1::text
