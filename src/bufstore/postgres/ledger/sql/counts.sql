-- Where the store that is flushed into is our own: what it holds of each thread, of one moment with the row's version.
SELECT b.thread_id, b.version, t.version::bigint, (
    SELECT count(*) FROM {schema}.messages AS m WHERE m.thread_id = b.thread_id
)
FROM {schema}.buffer_threads AS b
LEFT JOIN {schema}.threads AS t ON t.thread_id = b.thread_id
WHERE b.thread_id = ANY ($1::text[]) AND b.applied_id <> 0
