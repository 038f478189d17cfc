-- name: checkpoint
-- A checkpoint or an append, past the log: one call, whose function writes messages, run and thread (see
-- 0001_threads.sql).
SELECT * FROM {schema}.checkpoint_v1(
    $1::text, $2::boolean, $3::int, $4::bytea[], $5::bigint[],
    $6::text, $7::bytea, $8::text, $9::text,
    $10::bytea, $11::bytea, $12::bigint
);

-- name: lock_new_thread
-- A row that does not exist cannot be locked, so it is inserted first. Returns a row if the thread is new.
INSERT INTO {schema}.threads (thread_id) VALUES ($1::text) ON CONFLICT DO NOTHING RETURNING true;

-- name: lock_thread
-- The thread's row, locked until the edit commits. If the process stops in the middle, the lock is soon released.
SELECT t.saves FROM {schema}.threads AS t, set_config('idle_in_transaction_session_timeout', '10s', true)
WHERE t.thread_id = $1::text FOR UPDATE OF t;

-- name: count_save
-- Store the number and id of the edit's receipt in the thread's row.
UPDATE {schema}.threads SET saves = $2::bigint, last_id = $3::bigint WHERE thread_id = $1::text;
