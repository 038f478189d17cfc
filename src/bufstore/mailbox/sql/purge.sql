DELETE FROM {schema}.mailbox_dispatches d USING (
    SELECT thread_id, dispatch_id FROM {schema}.mailbox_dispatches WHERE completed_at < $1::bigint
    ORDER BY completed_at, position LIMIT $2::int FOR UPDATE SKIP LOCKED
) old
WHERE d.thread_id = old.thread_id AND d.dispatch_id = old.dispatch_id
RETURNING d.thread_id
