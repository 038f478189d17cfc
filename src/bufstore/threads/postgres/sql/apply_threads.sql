-- The threads' rows after a batch. Sorted, so that two batches lock in one order and never deadlock.
-- Where every saved run is done ($11), a run is only taken off the row if it is one of those ($12, $13):
-- the row as it was decides. Else the last states are known. `rank` tells which of the batch was changed later.
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
    updated_at = excluded.updated_at
