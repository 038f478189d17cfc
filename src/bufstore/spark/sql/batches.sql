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
-- Takes the name for the query, or says who has it. A batch that is repeated finds what was noted of it; those before it
-- do not come again.
WITH forgotten AS (
    DELETE FROM {schema}.spark_set_aside AS a USING {schema}.spark_sources AS s
    WHERE a.app_id = $1::text AND a.batch_id < $4::bigint AND s.app_id = $1::text AND s.query_id = $2::text
)
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

-- name: begun
-- The parts of a batch of which rows may be written.
SELECT part, parts, planned FROM {schema}.spark_parts WHERE app_id = $1::text AND batch_id = $2::bigint;

-- name: plan
-- Note what a part of a batch will write, before it does. Returns what was noted of it first.
INSERT INTO {schema}.spark_parts AS p (app_id, part, batch_id, parts, planned)
VALUES ($1::text, $2::integer, $3::bigint, $4::integer, $5::bigint)
ON CONFLICT (app_id, part) DO UPDATE SET
    parts = CASE WHEN p.batch_id < excluded.batch_id THEN excluded.parts ELSE p.parts END,
    planned = CASE WHEN p.batch_id < excluded.batch_id THEN excluded.planned ELSE p.planned END,
    batch_id = greatest(p.batch_id, excluded.batch_id)
RETURNING batch_id, parts, planned;

-- name: done
-- Note what a batch came to, also of one that its run began while Postgres was away, of which nothing else is noted.
UPDATE {schema}.spark_sources SET
    batch_id = $4::bigint, fingerprint = NULL, noted_batch = $4::bigint, planned = $5::bigint, done = true,
    settled = NULL, rows = $6::bigint, repeated = $7::bigint, bad = $8::bigint, waited_ms = $9::bigint, done_at = now()
WHERE app_id = $1::text AND query_id = $2::text
    AND (batch_id = $4::bigint OR (batch_id < $4::bigint AND run_id = $3::text));

-- name: stop
-- Note which rows are written of a batch that ended with bad rows, which may be corrected. Not of one that is done since.
WITH stopped AS (
    UPDATE {schema}.spark_sources SET
        batch_id = $4::bigint, fingerprint = NULL, noted_batch = $4::bigint, planned = NULL, done = false,
        settled = $5::bytea
    WHERE app_id = $1::text AND query_id = $2::text
        AND (batch_id = $4::bigint OR (batch_id < $4::bigint AND run_id = $3::text))
        AND NOT (done AND noted_batch IS NOT DISTINCT FROM $4::bigint)
    RETURNING app_id
)
DELETE FROM {schema}.spark_parts AS p USING stopped AS s WHERE p.app_id = s.app_id AND p.batch_id = $4::bigint;
