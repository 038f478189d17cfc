-- Entries that no thread is known of: nothing else depends on them.
DELETE FROM {schema}.buffer_quarantine WHERE seq = ANY ($1::bigint[]) AND thread_id IS NULL
