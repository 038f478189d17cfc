SELECT t.version, t.epoch, t.step, NULL, d.record, d.position, d.epoch, d.status, d.token, d.claim
FROM {schema}.mailbox_dispatches d LEFT JOIN {schema}.mailbox_threads t USING (thread_id) WHERE d.thread_id = $1::text
