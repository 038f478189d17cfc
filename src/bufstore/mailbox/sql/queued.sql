SELECT record, position, epoch, status, token FROM {schema}.mailbox_dispatches
WHERE thread_id = $1::text AND status = 0 AND epoch < $2::bigint ORDER BY priority, position LIMIT $3::int
