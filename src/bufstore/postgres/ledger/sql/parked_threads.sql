SELECT DISTINCT thread_id FROM {schema}.buffer_quarantine WHERE thread_id > $1::text COLLATE "C"
ORDER BY thread_id LIMIT $2::bigint
