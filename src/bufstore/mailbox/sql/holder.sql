SELECT dispatch_id FROM {schema}.mailbox_dispatches
WHERE thread_id = $1::text AND dedupe_key = $2::text AND status < 2
