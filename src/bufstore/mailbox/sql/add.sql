-- Enqueue: the thread's row gives the epoch, and is told when to look.
SELECT * FROM {schema}.mailbox_add_v1($1::text, $2::text, $3::int, $4::text, $5::bigint, $6::bytea, $7::text, $8::bigint)
