-- name: load_state
-- A thread with its latest run (one row with seq -1, which is always there) and its messages, in one statement and so
-- of one moment. They are not sorted here, because the payloads would go through a sort that spills to disk. $2:
-- whether to include the buffer's row for the thread.
SELECT -1 AS seq, t.* FROM {schema}.thread_row_v2($1::text, $2::boolean) AS t
UNION ALL
SELECT m.seq, m.payload, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM {schema}.messages AS m WHERE m.thread_id = $1::text;

-- name: load_thread
-- The thread's row, without its messages.
SELECT version, parent_thread_id, latest_run_id, active_run_id, open_run_id, metadata
FROM {schema}.threads WHERE thread_id = $1::text;

-- name: load_run
-- A run by its id.
SELECT record FROM {schema}.runs WHERE run_id = $1::text;

-- name: latest_run
-- The run that was saved last in the thread.
SELECT r.record
FROM {schema}.threads AS t JOIN {schema}.runs AS r ON r.run_id = t.latest_run_id
WHERE t.thread_id = $1::text;

-- name: load_kept_state
-- The state kept with a thread; no row if there is none.
SELECT state FROM {schema}.threads WHERE thread_id = $1::text AND state IS NOT NULL;

-- name: versions
-- How many messages each of these threads has.
SELECT thread_id, version FROM {schema}.threads WHERE thread_id = ANY ($1::text[]);
