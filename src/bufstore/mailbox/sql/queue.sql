-- A thread and, when it is free, the first of its queue that may be claimed at $2.
SELECT t.version, t.epoch, t.step, a.record, a.position, a.epoch, a.status, a.token,
    h.record, h.position, h.epoch, h.status, h.token
FROM {schema}.mailbox_threads t
LEFT JOIN {schema}.mailbox_dispatches a ON a.thread_id = t.thread_id AND a.dispatch_id = t.active_id
LEFT JOIN LATERAL (
    SELECT * FROM {schema}.mailbox_dispatches d
    WHERE d.thread_id = $1::text AND d.status = 0 AND d.available_at <= $2::bigint AND t.active_id IS NULL
    ORDER BY d.priority, d.position LIMIT 1
) h ON true
WHERE t.thread_id = $1::text
