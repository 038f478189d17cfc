INSERT INTO {schema}.spark_quarantine (app_id, batch_id, thread_id, rank, row, cause)
VALUES ($1::text, $2::bigint, $3::text, $4::bigint, $5::text, $6::text) ON CONFLICT DO NOTHING
