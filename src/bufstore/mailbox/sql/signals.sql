-- name: pull
-- Hand out threads that are due, each to one worker; it is due again after $3 milliseconds. $1: what the worker takes for
-- Postgres' now. It has asked some time ago, and the answer took a moment, by which it is behind: others may tell it of
-- work that, by its own clock, is not due yet. More than a second is no moment: the clock was set.
UPDATE {schema}.mailbox_threads t SET wake_at = $1::bigint + $3::bigint, wakes = t.wakes + 1
FROM (
    SELECT thread_id FROM {schema}.mailbox_threads WHERE wake_at <= greatest($1::bigint,
        least($1::bigint + 1000, (extract(epoch FROM statement_timestamp()) * 1000)::bigint))
    ORDER BY wake_at LIMIT $2::int FOR UPDATE SKIP LOCKED
) due
WHERE t.thread_id = due.thread_id
RETURNING t.thread_id, t.wakes, t.wake_at, (extract(epoch FROM statement_timestamp()) * 1000)::bigint;

-- name: signal_ack
-- Answer a signal: the thread is due again with its next dispatch. See 0004_signals.sql.
SELECT {schema}.mailbox_answer_v1($1::text, $2::bigint);

-- name: signal_lost
-- Signal threads that have work but will not be looked at. See 0004_signals.sql.
SELECT looked_at, signalled FROM {schema}.mailbox_signal_lost_v1($1::text, $2::int, $3::bigint, $4::bigint, $5::text);

-- name: wake
-- Make a thread due now, if it has any dispatches.
INSERT INTO {schema}.mailbox_threads AS t (thread_id, version, wake_at)
SELECT $1::text, {schema}.mailbox_number_v1($3::text),
    least($2::bigint, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
WHERE EXISTS (SELECT FROM {schema}.mailbox_dispatches WHERE thread_id = $1::text)
ON CONFLICT (thread_id) DO UPDATE SET wakes = 0, wake_at = excluded.wake_at;

-- name: gauges
-- How many threads wait for a worker (at most $2 are counted), and since when. Where a worker left work that is to be
-- done at once, wake_at is 0: that thread waits since its last step, whose number goes by the clock (in microseconds).
SELECT count(*), min(since) FROM (
    SELECT CASE WHEN wake_at > 0 THEN wake_at WHEN version > 1000000000000000 THEN version / 1000 END AS since
    FROM {schema}.mailbox_threads WHERE wake_at <= $1::bigint ORDER BY wake_at LIMIT $2::int
) due;

-- name: held
-- The version, the claim's token (0: no claim) and the epoch of each thread.
SELECT t.thread_id, t.version, coalesce(a.token, 0), t.epoch FROM {schema}.mailbox_threads t
LEFT JOIN {schema}.mailbox_dispatches a ON a.thread_id = t.thread_id AND a.dispatch_id = t.active_id
WHERE t.thread_id = ANY ($1::text[]);

-- name: signal_nack
-- Make a thread due at a time that the worker chooses, unless a newer signal has come meanwhile.
UPDATE {schema}.mailbox_threads SET wake_at = $3::bigint WHERE thread_id = $1::text AND wake_at = $2::bigint;

-- name: clock
-- Postgres' clock, in milliseconds.
SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
