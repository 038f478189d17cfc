SELECT partition, term, cursor_seq, cursor_id FROM {schema}.buffer_partitions ORDER BY partition
