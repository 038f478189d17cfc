-- name: pull
-- Threads to look at, each for one worker until $3 milliseconds are over.
UPDATE {schema}.mailbox_threads t SET wake_at = $1::bigint + $3::bigint, wakes = t.wakes + 1
FROM (
    SELECT thread_id FROM {schema}.mailbox_threads WHERE wake_at <= $1::bigint
    ORDER BY wake_at LIMIT $2::int FOR UPDATE SKIP LOCKED
) due
WHERE t.thread_id = due.thread_id
RETURNING t.thread_id, t.wakes, t.wake_at;

-- name: signal_ack
-- Look again when the next one is due; not if a newer signal has come meanwhile.
UPDATE {schema}.mailbox_threads t SET wakes = 0, wake_at = (
    SELECT min(available_at) FROM {schema}.mailbox_dispatches d
    WHERE d.thread_id = $1::text AND d.status = 0 AND d.epoch >= t.epoch
)
WHERE thread_id = $1::text AND wake_at = $2::bigint;

-- name: signal_nack
-- Look again at a time of the worker's choice; not if a newer signal has come meanwhile.
UPDATE {schema}.mailbox_threads SET wake_at = $3::bigint WHERE thread_id = $1::text AND wake_at = $2::bigint;

-- name: clock
-- Postgres' clock, in milliseconds.
SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
