SELECT DISTINCT d.thread_id FROM {schema}.mailbox_dispatches d JOIN {schema}.mailbox_threads t USING (thread_id)
WHERE d.status = 0 AND d.epoch >= t.epoch ORDER BY 1 LIMIT $1::int
