-- name: sweeps
-- Take the turn to sweep if the last sweep was long enough ago, or lies in the future (the clock went back). Returns a
-- row to whoever gets the turn.
UPDATE {schema}.mailbox_sweep SET swept_at = clock_timestamp()
WHERE swept_at NOT BETWEEN clock_timestamp() - make_interval(secs => $1::float8) AND clock_timestamp() RETURNING 1;

-- name: expiring
-- Threads whose lease has run out, the longest overdue first.
SELECT t.version, t.epoch, t.step, a.record, a.position, a.epoch, a.status, a.token, a.claim, t.thread_id
FROM {schema}.mailbox_threads t
JOIN {schema}.mailbox_dispatches a ON a.thread_id = t.thread_id AND a.dispatch_id = t.active_id
WHERE t.lease_until < $1::bigint ORDER BY t.lease_until LIMIT $2::int;

-- name: finished
-- Finished dispatches, the oldest first.
SELECT record, position, epoch, status, token, claim FROM {schema}.mailbox_dispatches
WHERE completed_at IS NOT NULL ORDER BY completed_at, position LIMIT $1::int;

-- name: purge
-- Remove up to $2 dispatches that finished before $1, the oldest first. This locks their threads, too, until
-- `purge_threads` has ended: nothing is enqueued into them meanwhile. If the process stops in between, the locks are soon
-- released. A thread with a step on its way is left out.
DELETE FROM {schema}.mailbox_dispatches d USING (
    SELECT thread_id, dispatch_id FROM set_config('idle_in_transaction_session_timeout', '10s', true),
        {schema}.mailbox_dispatches JOIN {schema}.mailbox_threads USING (thread_id)
    WHERE completed_at < $1::bigint ORDER BY completed_at, position LIMIT $2::int
    FOR UPDATE OF mailbox_dispatches, mailbox_threads SKIP LOCKED
) old
WHERE d.thread_id = old.thread_id AND d.dispatch_id = old.dispatch_id
RETURNING d.thread_id;

-- name: purge_threads
-- Remove those of the threads, which are locked, that have nothing left.
DELETE FROM {schema}.mailbox_threads t
WHERE thread_id = ANY ($1::text[]) AND active_id IS NULL
    AND NOT EXISTS (SELECT FROM {schema}.mailbox_dispatches d WHERE d.thread_id = t.thread_id);

-- name: queued_threads
-- Threads that have something in their queue.
SELECT DISTINCT d.thread_id FROM {schema}.mailbox_dispatches d JOIN {schema}.mailbox_threads t USING (thread_id)
WHERE d.status = 0 AND d.epoch >= t.epoch ORDER BY 1 LIMIT $1::int;

-- name: counts
-- How many dispatches there are of each status. What is queued of an older epoch counts as superseded.
SELECT CASE WHEN d.status = 0 AND d.epoch < t.epoch THEN $1::int ELSE d.status END, count(*)
FROM {schema}.mailbox_dispatches d LEFT JOIN {schema}.mailbox_threads t USING (thread_id) GROUP BY 1;
