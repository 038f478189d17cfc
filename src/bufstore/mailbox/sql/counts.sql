SELECT CASE WHEN d.status = 0 AND d.epoch < t.epoch THEN $1::int ELSE d.status END, count(*)
FROM {schema}.mailbox_dispatches d LEFT JOIN {schema}.mailbox_threads t USING (thread_id) GROUP BY 1
