-- Look again when the next one is due; not if a newer signal has come meanwhile.
UPDATE {schema}.mailbox_threads t SET wakes = 0, wake_at = (
    SELECT min(available_at) FROM {schema}.mailbox_dispatches d
    WHERE d.thread_id = $1::text AND d.status = 0 AND d.epoch >= t.epoch
)
WHERE thread_id = $1::text AND wake_at = $2::bigint
