-- name: begin
-- Takes the name for the query, or says who has it. A batch that is repeated finds itself, and what its rows came to.
INSERT INTO {schema}.spark_sources AS s (app_id, query_id, batch_id) VALUES ($1::text, $2::text, $3::bigint)
ON CONFLICT (app_id) DO UPDATE SET
    batch_id = CASE WHEN s.query_id = excluded.query_id THEN greatest(s.batch_id, excluded.batch_id) ELSE s.batch_id END,
    fingerprint = CASE
        WHEN s.query_id = excluded.query_id AND s.batch_id < excluded.batch_id THEN NULL
        ELSE s.fingerprint
    END
RETURNING query_id, batch_id, fingerprint;

-- name: done
-- Note what a batch came to.
UPDATE {schema}.spark_sources SET
    fingerprint = $3::bigint, rows = $4::bigint, repeated = $5::bigint, bad = $6::bigint, done_at = now()
WHERE app_id = $1::text AND batch_id = $2::bigint;

-- name: quarantine
-- Set aside a row that cannot become a checkpoint. A row that was set aside before stays as it is.
INSERT INTO {schema}.spark_quarantine (app_id, batch_id, thread_id, rank, row, cause)
VALUES ($1::text, $2::bigint, $3::text, $4::bigint, $5::text, $6::text) ON CONFLICT DO NOTHING;
