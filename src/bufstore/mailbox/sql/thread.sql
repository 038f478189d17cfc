SELECT t.version, t.epoch, t.step, a.record, a.position, a.epoch, a.status, a.token, a.claim
FROM {schema}.mailbox_threads t
LEFT JOIN {schema}.mailbox_dispatches a ON a.thread_id = t.thread_id AND a.dispatch_id = t.active_id
WHERE t.thread_id = $1::text
