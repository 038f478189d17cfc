-- A new owner: raise the terms, which fences every earlier one.
INSERT INTO {schema}.buffer_partitions AS p (partition, term, owner, cursor_seq, cursor_id)
SELECT s.partition, 1, $2::text, 0, 0 FROM unnest($1::int[]) AS s (partition) ORDER BY s.partition
ON CONFLICT (partition) DO UPDATE SET term = p.term + 1, owner = excluded.owner
RETURNING p.partition, p.term, p.cursor_seq, p.cursor_id
