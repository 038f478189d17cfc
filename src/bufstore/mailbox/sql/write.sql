-- A step: the thread's row if it has still version $2, and the dispatches that move. -1 stands for the new version.
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
-- Both or nothing: a division by zero takes all of it back.
SELECT t.version, 1 / ((SELECT count(*) FROM m) = cardinality($8::text[]))::int FROM t
