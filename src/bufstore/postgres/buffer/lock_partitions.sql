-- The partitions of a flush, held until its commit. The lock timeout ends with the transaction.
SELECT p.partition, p.term, set_config('lock_timeout', '250ms', true)
FROM {schema}.buffer_partitions AS p WHERE p.partition = ANY ($1::int[]) ORDER BY p.partition FOR UPDATE
