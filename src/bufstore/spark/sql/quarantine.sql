-- name: quarantine
-- Set aside a row that cannot become a checkpoint. A row that was set aside before stays as it is.
INSERT INTO {schema}.spark_quarantine (app_id, batch_id, thread_id, rank, row, cause, key)
SELECT $1::text, $2::bigint, $3::text, $4::bigint, $5::text, $6::text, $7::bytea
WHERE NOT $8::boolean OR NOT EXISTS (
    SELECT FROM {schema}.spark_quarantine
    WHERE thread_id = $3::text AND app_id = $1::text AND batch_id = $2::bigint AND rank = $4::bigint AND row = $5::text
)
ON CONFLICT DO NOTHING;
