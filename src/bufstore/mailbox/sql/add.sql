-- Enqueue: the thread's row gives the epoch, and is told when to look.
WITH t AS (
    INSERT INTO {schema}.mailbox_threads AS t (thread_id, version, wake_at)
    VALUES ($1::text, nextval($7::text::regclass), $8::bigint)
    ON CONFLICT (thread_id) DO UPDATE SET wake_at = least(t.wake_at, excluded.wake_at), enqueued = t.enqueued + 1
    RETURNING t.epoch
)
INSERT INTO {schema}.mailbox_dispatches (thread_id, dispatch_id, position, priority, epoch, status, available_at, dedupe_key, record)
SELECT $1::text, $2::text, nextval($7::text::regclass), $3::int, t.epoch, 0, $5::bigint, $4::text, $6::bytea FROM t
RETURNING position, epoch
