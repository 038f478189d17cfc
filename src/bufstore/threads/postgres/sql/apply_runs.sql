-- Newest records of runs, sorted by run id (as for threads). A run of another thread fails the batch.
-- `rank` tells which of the batch was created later.
-- A run saved again as it was is not written again: most steps change the messages and nothing of the run. (ON CONFLICT
-- … WHERE alone would lock, and so write, the row. OFFSET 0: see apply_cut.)
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
    updated_at = clock_timestamp()
