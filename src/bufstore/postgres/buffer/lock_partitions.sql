-- The partitions of a flush, held until its commit. The lock timeout ends with the transaction.
SELECT p.partition, p.term, p.cursor_seq, p.cursor_id, set_config('lock_timeout', '100ms', true)
FROM {schema}.buffer_partitions AS p WHERE p.partition = ANY ($1::int[]) ORDER BY p.partition FOR UPDATE
