-- The threads' rows after a batch. Sorted, so that two batches lock in one order and never deadlock.
-- Where every saved run is done ($7), a run is only taken off the row if it is one of those ($8, $9):
-- the row as it was decides. Else the last states are known.
INSERT INTO {schema}.threads AS t (thread_id, version, parent_thread_id, latest_run_id, active_run_id, open_run_id)
SELECT * FROM unnest($1::text[], $2::int[], $3::text[], $4::text[], $5::text[], $6::text[]) AS s (thread_id)
ORDER BY s.thread_id COLLATE "C"
ON CONFLICT (thread_id) DO UPDATE SET
    version = excluded.version,
    parent_thread_id = coalesce(t.parent_thread_id, excluded.parent_thread_id),
    latest_run_id = coalesce(excluded.latest_run_id, t.latest_run_id),
    active_run_id = CASE
        WHEN excluded.thread_id NOT IN (SELECT unnest($7::text[])) THEN excluded.active_run_id
        WHEN (excluded.thread_id, t.active_run_id) IN (SELECT * FROM unnest($8::text[], $9::text[])) THEN NULL
        ELSE t.active_run_id
    END,
    open_run_id = CASE
        WHEN excluded.thread_id NOT IN (SELECT unnest($7::text[])) THEN excluded.open_run_id
        WHEN (excluded.thread_id, t.open_run_id) IN (SELECT * FROM unnest($8::text[], $9::text[])) THEN NULL
        ELSE t.open_run_id
    END,
    updated_at = clock_timestamp()
