INSERT INTO {schema}.buffer_quarantine (seq, hash, thread_id, entry_id, base_id, cause, messages)
SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::text[], $7::bytea[])
ON CONFLICT (seq) DO NOTHING
