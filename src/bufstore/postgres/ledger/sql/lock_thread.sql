-- The thread's row, so that neither a flush nor another replay changes it meanwhile. For the settings see
-- lock_partitions.sql.
SELECT flushed_seq, applied_id, version, ring, broken_since, gone, sources, set_config('lock_timeout', '5s', true),
    set_config('idle_in_transaction_session_timeout', $2::text, true)
FROM {schema}.buffer_threads WHERE thread_id = $1::text FOR UPDATE
