-- name: lock_removals
-- Lock the rows of deleted threads, in the order that all writers use. If another session held one to write past the
-- buffer, the next statement sees what it wrote.
SELECT FROM {schema}.threads WHERE thread_id = ANY ($1::text[]) ORDER BY thread_id COLLATE "C" FOR UPDATE;

-- name: apply_removals
-- Delete threads with their runs and messages. Later statements of the batch may write some of them again.
WITH gone AS (SELECT unnest($1::text[]) COLLATE "C" AS thread_id),
messages AS (DELETE FROM {schema}.messages AS m USING gone WHERE m.thread_id = gone.thread_id),
runs AS (DELETE FROM {schema}.runs AS r USING gone WHERE r.thread_id = gone.thread_id)
DELETE FROM {schema}.threads AS t USING gone WHERE t.thread_id = gone.thread_id;

-- name: apply_threads
-- The threads' rows after a batch, sorted so that two batches lock in one order and never deadlock. If all saved runs
-- of a thread are done (the threads in $11), the row as it was decides: its active and open run are cleared only if
-- they are among those runs ($12, $13). Otherwise the last states are known. The parents of threads in $14 were set on
-- their own. `rank` is the order in which the threads of the batch were changed.
INSERT INTO {schema}.threads AS t (
    thread_id, version, parent_thread_id, latest_run_id, active_run_id, open_run_id,
    metadata, resource_id, state, updated_at
)
SELECT s.thread_id, s.version, s.parent, s.latest, s.active, s.open, s.metadata, s.resource, s.state,
    (SELECT clock_timestamp()) + s.rank * interval '1 microsecond'
FROM unnest(
    $1::text[], $2::int[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bytea[], $8::text[], $9::bytea[],
    $10::int[]
) AS s (thread_id, version, parent, latest, active, open, metadata, resource, state, rank)
ORDER BY s.thread_id COLLATE "C"
ON CONFLICT (thread_id) DO UPDATE SET
    version = excluded.version,
    parent_thread_id = CASE
        WHEN excluded.thread_id IN (SELECT unnest($14::text[])) THEN excluded.parent_thread_id
        ELSE coalesce(t.parent_thread_id, excluded.parent_thread_id)
    END,
    latest_run_id = coalesce(excluded.latest_run_id, t.latest_run_id),
    active_run_id = CASE
        WHEN excluded.thread_id NOT IN (SELECT unnest($11::text[])) THEN excluded.active_run_id
        WHEN (excluded.thread_id, t.active_run_id) IN (SELECT * FROM unnest($12::text[], $13::text[])) THEN NULL
        ELSE t.active_run_id
    END,
    open_run_id = CASE
        WHEN excluded.thread_id NOT IN (SELECT unnest($11::text[])) THEN excluded.open_run_id
        WHEN (excluded.thread_id, t.open_run_id) IN (SELECT * FROM unnest($12::text[], $13::text[])) THEN NULL
        ELSE t.open_run_id
    END,
    metadata = coalesce(excluded.metadata, t.metadata),
    resource_id = CASE WHEN excluded.metadata IS NULL THEN t.resource_id ELSE excluded.resource_id END,
    state = coalesce(excluded.state, t.state),
    updated_at = excluded.updated_at;

-- name: apply_cut
-- Messages beyond the new end of their thread. OFFSET 0 and ctid leave the planner one way, through the index: with no
-- or old statistics it would read the whole table for a few threads. Thread and position are compared once more,
-- because rows of other threads may have the same ctid in a table that is partitioned or inherited. (|| '' keeps the
-- planner from using the index for that comparison, and from looking for each row in the whole array.)
DELETE FROM {schema}.messages AS m USING unnest($1::text[], $2::int[]) AS s (thread_id, version)
WHERE m.thread_id || '' = s.thread_id AND m.seq >= s.version AND m.ctid = ANY (ARRAY(
    SELECT beyond.ctid
    FROM unnest($1::text[], $2::int[]) AS s (thread_id, version)
    CROSS JOIN LATERAL (
        SELECT m.ctid FROM {schema}.messages AS m WHERE m.thread_id = s.thread_id AND m.seq >= s.version OFFSET 0
    ) AS beyond
));

-- name: apply_messages
-- Messages that are new or follow what the thread keeps: few of them, if any, are there already.
INSERT INTO {schema}.messages AS m (thread_id, seq, payload, id_hash)
SELECT * FROM unnest($1::text[], $2::int[], $3::bytea[], $4::bigint[])
ON CONFLICT (thread_id, seq) DO UPDATE SET payload = excluded.payload, id_hash = excluded.id_hash
WHERE m.payload IS DISTINCT FROM excluded.payload;

-- name: apply_whole_messages
-- Messages of whole lists: many are there already, and only those that differ are written. (ON CONFLICT … WHERE alone
-- would lock every row, and so rewrite it. OFFSET 0: see apply_cut.)
INSERT INTO {schema}.messages (thread_id, seq, payload, id_hash)
SELECT s.*
FROM unnest($1::text[], $2::int[], $3::bytea[], $4::bigint[]) AS s (thread_id, seq, payload, id_hash)
LEFT JOIN LATERAL (
    SELECT m.payload FROM {schema}.messages AS m WHERE m.thread_id = s.thread_id AND m.seq = s.seq OFFSET 0
) AS there ON true
WHERE there.payload IS DISTINCT FROM s.payload
ON CONFLICT (thread_id, seq) DO UPDATE SET payload = excluded.payload, id_hash = excluded.id_hash;

-- name: takes_no_copy
-- Whether row level security is active for messages: then Postgres takes no COPY, whatever the policies say.
SELECT row_security_active(c.oid)
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname = 'messages';

-- name: copy_messages
-- Many messages that cannot be there yet. This costs a third of an INSERT, which looks for each of them
-- (docs/adr/0017).
COPY {schema}.messages (thread_id, seq, payload, id_hash) FROM STDIN (FORMAT binary);

-- name: apply_runs
-- The newest records of runs, sorted by run id for the same reason as threads. A run of another thread fails the batch.
-- `rank` is the order in which the runs of the batch were created. A run that is saved as it was is not written again:
-- most steps change the messages and nothing of the run. (ON CONFLICT … WHERE alone would lock the row, and so write
-- it. OFFSET 0: see apply_cut.)
INSERT INTO {schema}.runs AS r (run_id, thread_id, record, status, created_at)
SELECT s.run_id, s.thread_id, s.record, s.status, (SELECT clock_timestamp()) + s.rank * interval '1 microsecond'
FROM unnest($1::text[], $2::text[], $3::bytea[], $4::text[], $5::int[])
    AS s (run_id, thread_id, record, status, rank)
LEFT JOIN LATERAL (
    SELECT x.thread_id, x.record FROM {schema}.runs AS x WHERE x.run_id = s.run_id OFFSET 0
) AS there ON true
WHERE (there.thread_id, there.record) IS DISTINCT FROM (s.thread_id, s.record)
ON CONFLICT (run_id) DO UPDATE SET
    record = CASE WHEN r.thread_id = excluded.thread_id THEN excluded.record ELSE {schema}.run_taken() END,
    status = excluded.status,
    updated_at = clock_timestamp();
