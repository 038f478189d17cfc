-- Newest records of runs, sorted by run id (as for threads). A run of another thread fails the batch.
INSERT INTO {schema}.runs AS r (run_id, thread_id, record, status)
SELECT * FROM unnest($1::text[], $2::text[], $3::bytea[], $4::text[])
ON CONFLICT (run_id) DO UPDATE SET
    record = CASE WHEN r.thread_id = excluded.thread_id THEN excluded.record ELSE {schema}.run_taken() END,
    status = excluded.status,
    updated_at = clock_timestamp()
