-- The statements of every step as functions: Postgres plans each statement anew (a pooler in transaction mode forbids
-- prepared ones), but keeps the plans of a function. Planning these took longer than carrying them out.
-- A plan kept from when the tables were small must not read them whole: hence no enable_seqscan.

-- Enqueue. The thread's row supplies the epoch, and notes when a worker should look at the thread.
CREATE FUNCTION {schema}.mailbox_add_v1(text, text, int, text, bigint, bytea, text, bigint)
RETURNS TABLE (new_position bigint, of_epoch bigint)
LANGUAGE plpgsql SET enable_seqscan = off AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
WITH t AS (
    INSERT INTO {schema}.mailbox_threads AS t (thread_id, version, wake_at)
    VALUES ($1::text, nextval($7::text::regclass), $8::bigint)
    ON CONFLICT (thread_id) DO UPDATE SET wake_at = least(t.wake_at, excluded.wake_at), enqueued = t.enqueued + 1
    RETURNING t.epoch
)
INSERT INTO {schema}.mailbox_dispatches (thread_id, dispatch_id, position, priority, epoch, status, available_at, dedupe_key, record)
SELECT $1::text, $2::text, nextval($7::text::regclass), $3::int, t.epoch, 0, $5::bigint, $4::text, $6::bytea FROM t
RETURNING position, epoch;
END
$body$;

-- A thread and, if it is free, the first dispatch of its queue that may be claimed at $2.
CREATE FUNCTION {schema}.mailbox_queue_v1(text, bigint)
RETURNS TABLE (version bigint, epoch bigint, step text, a_record bytea, a_position bigint, a_epoch bigint, a_status int, a_token bigint,
    h_record bytea, h_position bigint, h_epoch bigint, h_status int, h_token bigint)
LANGUAGE plpgsql SET enable_seqscan = off AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
SELECT t.version, t.epoch, t.step, a.record, a.position, a.epoch, a.status, a.token,
    h.record, h.position, h.epoch, h.status, h.token
FROM {schema}.mailbox_threads t
LEFT JOIN {schema}.mailbox_dispatches a ON a.thread_id = t.thread_id AND a.dispatch_id = t.active_id
LEFT JOIN LATERAL (
    SELECT * FROM {schema}.mailbox_dispatches d
    WHERE d.thread_id = $1::text AND d.status = 0 AND d.available_at <= $2::bigint AND t.active_id IS NULL
    ORDER BY d.priority, d.position LIMIT 1
) h ON true
WHERE t.thread_id = $1::text;
END
$body$;

-- One step: updates the thread's row if its version is still $2, and the dispatches that move. -1 stands for the new
-- version.
CREATE FUNCTION {schema}.mailbox_write_v1(text, bigint, bigint, text, text, bigint, bigint, text[], int[], int[], bigint[], bigint[], bigint[], bytea[], text)
RETURNS TABLE (new_version bigint, whole int)
LANGUAGE plpgsql SET enable_seqscan = off AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
WITH t AS (
    INSERT INTO {schema}.mailbox_threads AS t (thread_id, version, epoch, step, active_id, lease_until, wake_at)
    SELECT $1::text, n, CASE $3::bigint WHEN -1 THEN n ELSE $3::bigint END, $4::text, $5::text, $6::bigint, $7::bigint
    FROM nextval($15::text::regclass) AS n
    WHERE $2::bigint = 0 OR EXISTS (SELECT FROM {schema}.mailbox_threads WHERE thread_id = $1::text)
    ON CONFLICT (thread_id) DO UPDATE SET version = excluded.version, epoch = excluded.epoch, step = excluded.step,
        active_id = excluded.active_id, lease_until = excluded.lease_until, wake_at = least(t.wake_at, excluded.wake_at)
    WHERE t.version = $2::bigint
    RETURNING t.version
), m AS (
    UPDATE {schema}.mailbox_dispatches AS d SET status = m.status, available_at = m.available_at,
        completed_at = m.completed_at, record = m.record,
        token = CASE m.token WHEN -1 THEN t.version ELSE m.token END
    FROM t, unnest($8::text[], $9::int[], $10::int[], $11::bigint[], $12::bigint[], $13::bigint[], $14::bytea[])
        AS m (dispatch_id, was, status, available_at, completed_at, token, record)
    WHERE d.thread_id = $1::text AND d.dispatch_id = m.dispatch_id AND d.status = m.was
    RETURNING 1
)
SELECT t.version, 1 / ((SELECT count(*) FROM m) = cardinality($8::text[]))::int FROM t;
END
$body$;
