SELECT seq, thread_id, base_id, cause, parked_at, messages FROM {schema}.buffer_quarantine WHERE seq = $1::bigint
