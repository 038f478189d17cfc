-- Rows of deleted threads below a position, a page at a time.
SELECT thread_id, flushed_seq FROM {schema}.buffer_threads
WHERE gone AND sources = '' AND flushed_seq < $1::bigint AND thread_id > $2::text COLLATE "C"
ORDER BY thread_id LIMIT $3::bigint
