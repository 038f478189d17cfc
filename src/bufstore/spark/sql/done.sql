UPDATE {schema}.spark_sources SET fingerprint = $3::bigint, rows = $4::bigint, repeated = $5::bigint, bad = $6::bigint, done_at = now()
WHERE app_id = $1::text AND batch_id = $2::bigint
