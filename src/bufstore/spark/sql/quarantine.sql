-- name: quarantine
-- Set aside a row that cannot become a checkpoint. A row that was set aside before stays as it is, or gone.
WITH noted AS (
    INSERT INTO {schema}.spark_set_aside (app_id, batch_id, key)
    SELECT $1::text, $2::bigint, $7::bytea WHERE $8::boolean
    ON CONFLICT DO NOTHING
    RETURNING key
)
INSERT INTO {schema}.spark_quarantine (app_id, batch_id, thread_id, rank, row, cause, key)
SELECT $1::text, $2::bigint, $3::text, $4::bigint, $5::text, $6::text, $7::bytea
WHERE NOT $8::boolean OR EXISTS (SELECT FROM noted) AND NOT EXISTS (
    SELECT FROM {schema}.spark_quarantine
    WHERE thread_id = $3::text AND app_id = $1::text AND batch_id = $2::bigint AND rank = $4::bigint AND row = $5::text
)
ON CONFLICT DO NOTHING;

-- name: set_aside
-- The rows of a batch that were set aside, whatever became of them.
SELECT key FROM {schema}.spark_set_aside WHERE app_id = $1::text AND batch_id = $2::bigint;

-- name: tables
-- Whether a sink has made its tables here.
SELECT to_regclass(format('%I.%I', $1::text, 'spark_replays')) IS NOT NULL;

-- name: page
-- Rows that are set aside, of all threads and app ids or of one.
SELECT id, app_id, batch_id, thread_id, row, cause, parked_at FROM {schema}.spark_quarantine
WHERE id > $1::bigint AND ($2::text IS NULL OR thread_id = $2::text) AND ($3::text IS NULL OR app_id = $3::text)
ORDER BY id LIMIT $4::int;

-- name: count
-- How many rows are set aside.
SELECT count(*) FROM {schema}.spark_quarantine;

-- name: correct
-- Put another row in the place of one that is certainly not written.
UPDATE {schema}.spark_quarantine SET row = $2::text, thread_id = $3::text WHERE id = $1::bigint AND replay IS NULL
RETURNING id;

-- name: lock_replays
-- One process at a time numbers or replays rows of a thread, until its transaction ends: each in the order of numbers.
SELECT pg_advisory_xact_lock(hashtextextended('bufstore spark replay ' || $1::text || ' ' || $2::text, 0));

-- name: number
-- Number rows of a thread for their replay, in the order in which they were set aside. By the clock: threads keep the
-- highest number, and a sequence begins anew, or goes back, with a Postgres that was restored. (With it, because earlier
-- releases numbered by the sequence alone.)
UPDATE {schema}.spark_quarantine q SET replay = n.replay
FROM (
    SELECT id, greatest(
        nextval(format('%I.%I', $3::text, 'spark_replays')::regclass),
        (extract(epoch FROM statement_timestamp()) * 1000000)::bigint + row_number() OVER (ORDER BY id)
    ) AS replay
    FROM {schema}.spark_quarantine
    WHERE thread_id = $1::text AND replay IS NULL AND ($2::bigint[] IS NULL OR id = ANY ($2::bigint[]))
) n
WHERE q.id = n.id
RETURNING q.id;

-- name: numbered
-- The first row of a thread whose replay has begun.
SELECT id, row, replay FROM {schema}.spark_quarantine WHERE thread_id = $1::text AND replay IS NOT NULL
ORDER BY replay LIMIT 1 FOR UPDATE;

-- name: refused
-- A row that was refused again is certainly not written.
UPDATE {schema}.spark_quarantine SET replay = NULL, cause = $2::text WHERE id = $1::bigint;

-- name: discard
-- Forget rows.
DELETE FROM {schema}.spark_quarantine WHERE id = ANY ($1::bigint[]) RETURNING id;

-- name: threads_of
-- The threads of these rows.
SELECT DISTINCT thread_id FROM {schema}.spark_quarantine WHERE id = ANY ($1::bigint[]);

-- name: next_threads
-- Threads of which rows are set aside, a page.
SELECT DISTINCT thread_id FROM {schema}.spark_quarantine WHERE thread_id > $1::text ORDER BY thread_id LIMIT 1000;
