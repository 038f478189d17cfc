-- Threads of which nothing is left; one into which something is put meanwhile has another count by then.
DELETE FROM {schema}.mailbox_threads t USING (
    SELECT thread_id, version, enqueued FROM {schema}.mailbox_threads o
    WHERE thread_id = ANY ($1::text[]) AND active_id IS NULL
    AND NOT EXISTS (SELECT FROM {schema}.mailbox_dispatches d WHERE d.thread_id = o.thread_id)
) empty
WHERE t.thread_id = empty.thread_id AND t.version = empty.version AND t.enqueued = empty.enqueued
