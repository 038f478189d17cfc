-- The partitions of a flush, held until its commit. The settings end with the transaction, too: nobody waits long for a
-- lock, and a process that stops in the middle (it is frozen, or its host is gone) holds none for long.
SELECT p.partition, p.term, p.cursor_seq, p.cursor_id
FROM {schema}.buffer_partitions AS p, (
    SELECT set_config('lock_timeout', $3::text, true),
        set_config('idle_in_transaction_session_timeout', $2::text, true),
        set_config('tcp_user_timeout', $2::text, true)
) AS settings
WHERE p.partition = ANY ($1::int[]) ORDER BY p.partition FOR UPDATE OF p
