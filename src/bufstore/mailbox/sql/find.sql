SELECT t.version, t.epoch, t.step, a.record, a.position, a.epoch, a.status, a.token, a.claim,
    h.record, h.position, h.epoch, h.status, h.token, h.claim
FROM (VALUES ($1::text)) AS v (thread_id)
LEFT JOIN {schema}.mailbox_threads t ON t.thread_id = v.thread_id
LEFT JOIN {schema}.mailbox_dispatches a ON a.thread_id = t.thread_id AND a.dispatch_id = t.active_id
LEFT JOIN {schema}.mailbox_dispatches h ON h.thread_id = v.thread_id AND h.dispatch_id = $2::text
