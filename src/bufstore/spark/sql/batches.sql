-- name: ping
-- Whether Postgres answers.
SELECT 1;

-- name: renamed
-- Another app id under which an earlier run of the query has begun this batch or a later one, unless this app id is
-- known: a query may have several sinks.
SELECT s.app_id, s.batch_id FROM {schema}.spark_sources s
WHERE s.query_id = $2::text AND s.query_id <> '' AND s.app_id <> $1::text AND s.batch_id >= $4::bigint
    AND s.run_id <> $3::text AND NOT EXISTS (SELECT FROM {schema}.spark_sources o WHERE o.app_id = $1::text)
LIMIT 1;

-- name: begin
-- Takes the name for the query, or says who has it. A batch that is repeated finds what was noted of it.
INSERT INTO {schema}.spark_sources AS s (app_id, query_id, run_id, batch_id)
VALUES ($1::text, $2::text, $3::text, $4::bigint)
ON CONFLICT (app_id) DO UPDATE SET
    batch_id = CASE WHEN s.query_id = excluded.query_id THEN greatest(s.batch_id, excluded.batch_id) ELSE s.batch_id END,
    run_id = CASE
        WHEN s.query_id = excluded.query_id AND s.batch_id <= excluded.batch_id THEN excluded.run_id
        ELSE s.run_id
    END,
    fingerprint = CASE
        WHEN s.query_id = excluded.query_id AND s.batch_id < excluded.batch_id THEN NULL
        ELSE s.fingerprint
    END
RETURNING query_id, batch_id, CASE WHEN noted_batch = batch_id THEN planned END,
    coalesce(noted_batch = batch_id AND done, false), CASE WHEN noted_batch = batch_id THEN settled END;

-- name: plan
-- Note what a batch will write, before it does.
UPDATE {schema}.spark_sources SET
    settled = CASE WHEN noted_batch = batch_id THEN settled END, noted_batch = batch_id, planned = $3::bigint, done = false
WHERE app_id = $1::text AND batch_id = $2::bigint;

-- name: done
-- Note what a batch came to.
UPDATE {schema}.spark_sources SET
    noted_batch = batch_id, planned = $3::bigint, done = true, settled = NULL, rows = $4::bigint,
    repeated = $5::bigint, bad = $6::bigint, waited_ms = $7::bigint, done_at = now()
WHERE app_id = $1::text AND batch_id = $2::bigint;

-- name: stop
-- Note which rows are written of a batch that ended with bad rows.
UPDATE {schema}.spark_sources SET noted_batch = batch_id, planned = NULL, done = false, settled = $3::bytea
WHERE app_id = $1::text AND batch_id = $2::bigint;
