-- Works with: 0003
-- Signals go by what is queued when they are answered, and what no signal tells of is found.

-- Answer a signal: $2 is the time that it was given for. False when the thread is claimed. Else the thread is looked at
-- when its next dispatch is due. Each statement here sees what was there when it began: hence the lock comes first.
CREATE FUNCTION {schema}.mailbox_answer_v1(text, bigint) RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off AS $body$
DECLARE
    t {schema}.mailbox_threads;
BEGIN
    SELECT * INTO t FROM {schema}.mailbox_threads WHERE thread_id = $1 FOR UPDATE;
    IF t.wake_at IS DISTINCT FROM $2 THEN
        RETURN true;  -- a newer signal has come, or nothing of the thread is left
    END IF;
    IF t.active_id IS NOT NULL THEN
        RETURN false;
    END IF;
    UPDATE {schema}.mailbox_threads SET wakes = 0, wake_at = (
        SELECT min(available_at) FROM {schema}.mailbox_dispatches WHERE thread_id = $1 AND status = 0
    ) WHERE thread_id = $1;
    RETURN true;
END
$body$;

-- The next $2 threads after $1 that have something queued, by their ids; those are signalled that are free, have
-- something due at $3, and will not be looked at before $4.
CREATE FUNCTION {schema}.mailbox_signal_lost_v1(text, int, bigint, bigint, text)
RETURNS TABLE (looked_at text, signalled boolean)
LANGUAGE plpgsql SET enable_seqscan = off AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
WITH RECURSIVE queued AS (
    (SELECT thread_id, 1 AS n FROM {schema}.mailbox_dispatches
        WHERE status = 0 AND thread_id > $1 COLLATE "C" ORDER BY thread_id LIMIT 1)
    UNION ALL
    SELECT d.thread_id, q.n + 1 FROM queued q CROSS JOIN LATERAL (
        SELECT thread_id FROM {schema}.mailbox_dispatches
        WHERE status = 0 AND thread_id > q.thread_id ORDER BY thread_id LIMIT 1
    ) d WHERE q.n < $2
), lost AS (
    INSERT INTO {schema}.mailbox_threads AS t (thread_id, version, wake_at)
    SELECT q.thread_id, nextval($5::regclass), $3 FROM queued q
    LEFT JOIN {schema}.mailbox_threads t ON t.thread_id = q.thread_id
    WHERE t.active_id IS NULL AND (t.wake_at IS NULL OR t.wake_at > $4) AND EXISTS (
        SELECT FROM {schema}.mailbox_dispatches d
        WHERE d.thread_id = q.thread_id AND d.status = 0 AND d.available_at <= $3
    )
    ON CONFLICT (thread_id) DO UPDATE SET wake_at = excluded.wake_at
    WHERE t.active_id IS NULL AND (t.wake_at IS NULL OR t.wake_at > $4)
    RETURNING t.thread_id
)
SELECT q.thread_id, EXISTS (SELECT FROM lost l WHERE l.thread_id = q.thread_id) FROM queued q ORDER BY q.thread_id;
END
$body$;
