SELECT t.version, t.epoch, t.step, a.record, a.position, a.epoch, a.status, a.token, a.claim, t.thread_id
FROM {schema}.mailbox_threads t
JOIN {schema}.mailbox_dispatches a ON a.thread_id = t.thread_id AND a.dispatch_id = t.active_id
WHERE t.lease_until < $1::bigint ORDER BY t.lease_until LIMIT $2::int
