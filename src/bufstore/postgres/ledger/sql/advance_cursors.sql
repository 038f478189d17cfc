UPDATE {schema}.buffer_partitions AS p SET cursor_seq = s.cursor_seq, cursor_id = s.cursor_id, term = s.term
FROM unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[]) AS s (partition, cursor_seq, cursor_id, term)
WHERE p.partition = s.partition
