-- Rows of deleted threads below a position, a page at a time.
SELECT thread_id, flushed_seq FROM {schema}.buffer_threads
WHERE gone AND flushed_seq < $1::bigint AND (flushed_seq, thread_id) > ($2::bigint, $3::text COLLATE "C")
ORDER BY flushed_seq, thread_id LIMIT $4::bigint
