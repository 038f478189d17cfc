-- name: quarantine
-- Sets aside a row that cannot become a checkpoint. Does nothing if the row was set aside before, even if it has been
-- replayed or discarded since, or if a later batch was begun, which has forgotten that: returns whether one was. None
-- begins while this runs. Fails if its number is taken, as where the sequence was left behind (logical replication
-- copies none): else the row would be nowhere.
WITH latest AS MATERIALIZED (
    SELECT batch_id FROM {schema}.spark_sources WHERE app_id = $1::text AND $8::boolean FOR SHARE
), late AS MATERIALIZED (
    SELECT FROM latest WHERE batch_id > $2::bigint
), noted AS (
    INSERT INTO {schema}.spark_set_aside (app_id, batch_id, key)
    SELECT $1::text, $2::bigint, $7::bytea WHERE $8::boolean AND NOT EXISTS (SELECT FROM late)
    ON CONFLICT DO NOTHING
    RETURNING key
), kept AS (
    INSERT INTO {schema}.spark_quarantine (app_id, batch_id, thread_id, rank, row, cause, key)
    SELECT $1::text, $2::bigint, $3::text, $4::bigint, $5::text, $6::text, $7::bytea
    WHERE NOT $8::boolean OR EXISTS (SELECT FROM noted) AND NOT EXISTS (
        SELECT FROM {schema}.spark_quarantine
        WHERE thread_id = $3::text AND app_id = $1::text AND batch_id = $2::bigint AND rank = $4::bigint
            AND row = $5::text
    )
    ON CONFLICT (key) DO NOTHING
)
SELECT EXISTS (SELECT FROM late);

-- name: set_aside
-- The keys of a batch's rows that were set aside, even if they have left quarantine.
SELECT key FROM {schema}.spark_set_aside WHERE app_id = $1::text AND batch_id = $2::bigint;

-- name: tables
-- Whether a sink has created its tables in this schema.
SELECT to_regclass(format('%I.%I', $1::text, 'spark_replays')) IS NOT NULL;

-- name: page
-- A page of the rows in quarantine, optionally only those of one thread or one app id.
SELECT id, app_id, batch_id, thread_id, row, cause, parked_at FROM {schema}.spark_quarantine
WHERE id > $1::bigint AND ($2::text IS NULL OR thread_id = $2::text) AND ($3::text IS NULL OR app_id = $3::text)
ORDER BY id LIMIT $4::int;

-- name: count
-- How many rows are in quarantine.
SELECT count(*) FROM {schema}.spark_quarantine;

-- name: correct
-- Replaces a row that is certainly not written: no replay of it has begun.
UPDATE {schema}.spark_quarantine SET row = $2::text, thread_id = $3::text WHERE id = $1::bigint AND replay IS NULL
RETURNING id;

-- name: lock_replays
-- Until the end of the transaction, no other process numbers or replays rows of this thread.
SELECT pg_advisory_xact_lock(hashtextextended('bufstore spark replay ' || $1::text || ' ' || $2::text, 0));

-- name: number
-- Numbers rows of a thread for their replay, in the order in which they were set aside. The numbers come from the
-- clock: threads remember the highest number, and a sequence falls back when Postgres is restored from a backup. They
-- are also no lower than the sequence, because earlier releases took their numbers from it; and above $4, the highest
-- that the thread remembers, and those of rows whose replay has begun: clocks go back, too, and a number below another
-- one would count as written. The row's thread is asked for twice, because somebody may give the row another one while
-- this waits for them.
UPDATE {schema}.spark_quarantine q SET replay = n.replay
FROM (
    SELECT id, greatest(
        nextval(format('%I.%I', $3::text, 'spark_replays')::regclass),
        (extract(epoch FROM statement_timestamp()) * 1000000)::bigint + row_number() OVER (ORDER BY id),
        greatest($4::bigint, (SELECT max(replay) FROM {schema}.spark_quarantine WHERE thread_id = $1::text))
            + row_number() OVER (ORDER BY id)
    ) AS replay
    FROM {schema}.spark_quarantine
    WHERE thread_id = $1::text AND replay IS NULL AND ($2::bigint[] IS NULL OR id = ANY ($2::bigint[]))
) n
WHERE q.id = n.id AND q.thread_id = $1::text AND q.replay IS NULL;

-- name: numbered
-- The row of a thread that is replayed next: the one with the lowest number.
SELECT id, row, replay FROM {schema}.spark_quarantine WHERE thread_id = $1::text AND replay IS NOT NULL
ORDER BY replay LIMIT 1 FOR UPDATE;

-- name: refused
-- Takes back the number of a row that was refused again, or of which nobody knows whether it is written.
UPDATE {schema}.spark_quarantine SET replay = NULL, cause = $2::text WHERE id = $1::bigint;

-- name: discard
-- Deletes rows from quarantine.
DELETE FROM {schema}.spark_quarantine WHERE id = ANY ($1::bigint[]) RETURNING id;

-- name: threads_of
-- The threads to which these rows belong.
SELECT DISTINCT thread_id FROM {schema}.spark_quarantine WHERE id = ANY ($1::bigint[]);

-- name: next_threads
-- A page of the threads that have rows in quarantine.
SELECT DISTINCT thread_id FROM {schema}.spark_quarantine WHERE thread_id > $1::text ORDER BY thread_id LIMIT 1000;
