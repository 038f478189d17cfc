-- Threads to look at, each for one worker until $3 milliseconds are over.
UPDATE {schema}.mailbox_threads t SET wake_at = $1::bigint + $3::bigint, wakes = t.wakes + 1
FROM (
    SELECT thread_id FROM {schema}.mailbox_threads WHERE wake_at <= $1::bigint
    ORDER BY wake_at LIMIT $2::int FOR UPDATE SKIP LOCKED
) due
WHERE t.thread_id = due.thread_id
RETURNING t.thread_id, t.wakes, t.wake_at
