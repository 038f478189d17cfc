-- name: lock_removals
-- The rows of threads that were deleted, in the order of all writers: what somebody wrote past the buffer, who held one,
-- is there for the next statement to see.
SELECT FROM {schema}.threads WHERE thread_id = ANY ($1::text[]) ORDER BY thread_id COLLATE "C" FOR UPDATE;

-- name: apply_removals
-- Threads that were deleted, with their runs and messages, whatever of them is written again after this.
WITH gone AS (SELECT unnest($1::text[]) COLLATE "C" AS thread_id),
messages AS (DELETE FROM {schema}.messages AS m USING gone WHERE m.thread_id = gone.thread_id),
runs AS (DELETE FROM {schema}.runs AS r USING gone WHERE r.thread_id = gone.thread_id)
DELETE FROM {schema}.threads AS t USING gone WHERE t.thread_id = gone.thread_id;

-- name: apply_threads
-- The threads' rows after a batch. Sorted, so that two batches lock in one order and never deadlock. Where every saved
-- run is done ($11), a run is only taken off the row if it is one of those ($12, $13): the row as it was decides. Else
-- the last states are known. `rank` tells which of the batch was changed later.
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
-- or old statistics it would read the whole table for a few threads. The row itself says whether it goes: in a table
-- that is partitioned or inherited, rows of other threads have the same ctid. (|| '': otherwise it might go through the
-- index once more, and look for each row in the whole array.)
DELETE FROM {schema}.messages AS m USING unnest($1::text[], $2::int[]) AS s (thread_id, version)
WHERE m.thread_id || '' = s.thread_id AND m.seq >= s.version AND m.ctid = ANY (ARRAY(
    SELECT beyond.ctid
    FROM unnest($1::text[], $2::int[]) AS s (thread_id, version)
    CROSS JOIN LATERAL (
        SELECT m.ctid FROM {schema}.messages AS m WHERE m.thread_id = s.thread_id AND m.seq >= s.version OFFSET 0
    ) AS beyond
));

-- name: apply_messages
-- Messages that are new or follow the thread's kept part: few, if any, are there already.
INSERT INTO {schema}.messages AS m (thread_id, seq, payload, id_hash)
SELECT * FROM unnest($1::text[], $2::int[], $3::bytea[], $4::bigint[])
ON CONFLICT (thread_id, seq) DO UPDATE SET payload = excluded.payload, id_hash = excluded.id_hash
WHERE m.payload IS DISTINCT FROM excluded.payload;

-- name: apply_whole_messages
-- Messages of whole lists: many are there already, and only those that differ are written. (ON CONFLICT … WHERE alone
-- would lock, and so rewrite, every row. OFFSET 0: see apply_cut.)
INSERT INTO {schema}.messages (thread_id, seq, payload, id_hash)
SELECT s.*
FROM unnest($1::text[], $2::int[], $3::bytea[], $4::bigint[]) AS s (thread_id, seq, payload, id_hash)
LEFT JOIN LATERAL (
    SELECT m.payload FROM {schema}.messages AS m WHERE m.thread_id = s.thread_id AND m.seq = s.seq OFFSET 0
) AS there ON true
WHERE there.payload IS DISTINCT FROM s.payload
ON CONFLICT (thread_id, seq) DO UPDATE SET payload = excluded.payload, id_hash = excluded.id_hash;

-- name: copy_messages
-- Messages that cannot be there yet, many of them: a third of what the INSERT costs that looks for each
-- (docs/adr/0017).
COPY {schema}.messages (thread_id, seq, payload, id_hash) FROM STDIN (FORMAT binary);

-- name: apply_runs
-- Newest records of runs, sorted by run id (as for threads). A run of another thread fails the batch. `rank` tells
-- which of the batch was created later. A run saved again as it was is not written again: most steps change the
-- messages and nothing of the run. (ON CONFLICT … WHERE alone would lock, and so write, the row. OFFSET 0: see
-- apply_cut.)
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
