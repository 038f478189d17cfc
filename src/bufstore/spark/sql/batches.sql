-- name: ping
-- Returns a row if Postgres answers.
SELECT 1;

-- name: renamed
-- Finds another app id under which an earlier run of the query began this batch or a later one. Finds none if this app
-- id is already known: then it is another sink of the same query.
SELECT s.app_id, s.batch_id FROM {schema}.spark_sources s
WHERE s.query_id = $2::text AND s.query_id <> '' AND s.app_id <> $1::text AND s.batch_id >= $4::bigint
    AND s.run_id <> $3::text AND NOT EXISTS (SELECT FROM {schema}.spark_sources o WHERE o.app_id = $1::text)
LIMIT 1;

-- name: begin
-- Takes the app id for the query, unless another query has it, and returns the holder with what was noted about its
-- batch. Earlier batches will not be repeated, so their set-aside rows are forgotten.
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
-- The parts of a batch that have been begun: some of their rows may be written.
SELECT part, parts, planned FROM {schema}.spark_parts WHERE app_id = $1::text AND batch_id = $2::bigint;

-- name: plan
-- Notes a part of a batch before its first row is written. If the part was noted before, returns what was noted then.
INSERT INTO {schema}.spark_parts AS p (app_id, part, batch_id, parts, planned)
VALUES ($1::text, $2::integer, $3::bigint, $4::integer, $5::bigint)
ON CONFLICT (app_id, part) DO UPDATE SET
    parts = CASE WHEN p.batch_id < excluded.batch_id THEN excluded.parts ELSE p.parts END,
    planned = CASE WHEN p.batch_id < excluded.batch_id THEN excluded.planned ELSE p.planned END,
    batch_id = greatest(p.batch_id, excluded.batch_id)
RETURNING batch_id, parts, planned;

-- name: done
-- Notes the outcome of a batch. If the batch began while Postgres was away, nothing about it has been noted before.
UPDATE {schema}.spark_sources SET
    batch_id = $4::bigint, fingerprint = NULL, noted_batch = $4::bigint, planned = $5::bigint, done = true,
    settled = NULL, rows = $6::bigint, repeated = $7::bigint, bad = $8::bigint, waited_ms = $9::bigint, done_at = now()
WHERE app_id = $1::text AND query_id = $2::text
    AND (batch_id = $4::bigint OR (batch_id < $4::bigint AND run_id = $3::text));

-- name: stop
-- Notes which rows of a batch were written before bad rows ended it: the batch may come again with corrected rows. Does
-- nothing if the batch has been done since.
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
