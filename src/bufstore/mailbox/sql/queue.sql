-- A thread and, when it is free, the first of its queue that may be claimed at $2.
SELECT * FROM {schema}.mailbox_queue_v1($1::text, $2::bigint)
