SELECT record, position, epoch, status, token FROM {schema}.mailbox_dispatches
WHERE completed_at IS NOT NULL ORDER BY completed_at, position LIMIT $1::int
