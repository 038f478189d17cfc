-- name: claim
-- Claim the first dispatch of the queue: see 0003_claim_at_once.sql.
SELECT * FROM {schema}.mailbox_claim_v1($1::text, $2::bigint, $3::text, $4::bytea, $5::bigint, $6::text);

-- name: write
-- One step: updates the thread's row if its version is still $2, and the dispatches that move. -1 stands for the new
-- version. $7: the time to look at the thread, if it is to be looked at, but no later than Postgres' now.
SELECT * FROM {schema}.mailbox_write_v1(
    $1::text, $2::bigint, $3::bigint, $4::text, $5::text, $6::bigint,
    CASE WHEN $7::bigint IS NOT NULL
        THEN least($7::bigint, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
    END,
    $8::text[], $9::int[], $10::int[], $11::bigint[], $12::bigint[], $13::bigint[], $14::bytea[], $15::text
);

-- name: set_aside
-- End a dispatch of thread $1 with status $5, if the thread's version is still $2: the claimed one, or, with a
-- position $6, the one that is queued there.
WITH o AS (
    SELECT thread_id, active_id FROM {schema}.mailbox_threads WHERE thread_id = $1::text AND version = $2::bigint FOR UPDATE
), t AS (
    UPDATE {schema}.mailbox_threads SET version = {schema}.mailbox_number_v1($4::text), step = '', active_id = NULL,
        lease_until = NULL, wake_at = $3::bigint
    FROM o WHERE mailbox_threads.thread_id = o.thread_id
)
UPDATE {schema}.mailbox_dispatches d SET status = $5::int, completed_at = $3::bigint, claim = NULL, token = 0
FROM o WHERE d.thread_id = o.thread_id
    AND (d.dispatch_id = o.active_id OR (d.position = $6::bigint AND d.status = 0)) RETURNING 1;
