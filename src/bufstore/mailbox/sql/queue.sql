-- name: add
-- Enqueue. The thread's row supplies the epoch, and notes when a worker should look at the thread: when the dispatch
-- becomes available ($5), or now. What the process takes for now ($8) may lie in Postgres' future: only sweeps set its
-- clock, and a process that only enqueues makes none.
SELECT * FROM {schema}.mailbox_add_v1(
    $1::text, $2::text, $3::int, $4::text, $5::bigint, $6::bytea, $7::text,
    CASE WHEN $5::bigint >= $8::bigint THEN $8::bigint
        ELSE least($8::bigint, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
    END
);

-- name: queue
-- A thread and, if it is free, the first dispatch of its queue that may be claimed at $2.
SELECT version, epoch, step, a_record, a_position, a_epoch, a_status, a_token, NULL::bytea AS a_claim,
    h_record, h_position, h_epoch, h_status, h_token, NULL::bytea AS h_claim
FROM {schema}.mailbox_queue_v1($1::text, $2::bigint);

-- name: queued
-- Queued dispatches of earlier epochs than $2, in the order in which they would be claimed.
SELECT record, position, epoch, status, token, claim FROM {schema}.mailbox_dispatches
WHERE thread_id = $1::text AND status = 0 AND epoch < $2::bigint ORDER BY priority, position LIMIT $3::int;

-- name: holder
-- The queued or claimed dispatch that holds a deduplication key.
SELECT dispatch_id FROM {schema}.mailbox_dispatches
WHERE thread_id = $1::text AND dedupe_key = $2::text AND status < 2;

-- name: find
-- A thread with its active dispatch, and a dispatch by its id. Always one row; what does not exist is NULL.
SELECT t.version, t.epoch, t.step, a.record, a.position, a.epoch, a.status, a.token, a.claim,
    h.record, h.position, h.epoch, h.status, h.token, h.claim
FROM (VALUES ($1::text)) AS v (thread_id)
LEFT JOIN {schema}.mailbox_threads t ON t.thread_id = v.thread_id
LEFT JOIN {schema}.mailbox_dispatches a ON a.thread_id = t.thread_id AND a.dispatch_id = t.active_id
LEFT JOIN {schema}.mailbox_dispatches h ON h.thread_id = v.thread_id AND h.dispatch_id = $2::text;

-- name: thread
-- A thread and its active dispatch.
SELECT t.version, t.epoch, t.step, a.record, a.position, a.epoch, a.status, a.token, a.claim
FROM {schema}.mailbox_threads t
LEFT JOIN {schema}.mailbox_dispatches a ON a.thread_id = t.thread_id AND a.dispatch_id = t.active_id
WHERE t.thread_id = $1::text;

-- name: all_of
-- All dispatches of a thread, finished ones too.
SELECT t.version, t.epoch, t.step, NULL, NULL, NULL, NULL, NULL, NULL,
    d.record, d.position, d.epoch, d.status, d.token, d.claim
FROM {schema}.mailbox_dispatches d LEFT JOIN {schema}.mailbox_threads t USING (thread_id) WHERE d.thread_id = $1::text;
