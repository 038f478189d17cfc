SELECT r.record
FROM {schema}.threads AS t JOIN {schema}.runs AS r ON r.run_id = t.latest_run_id
WHERE t.thread_id = $1::text
