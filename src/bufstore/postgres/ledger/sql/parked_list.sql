-- A page of the quarantine. Superseded: the thread has gone on since the entry was parked.
SELECT q.seq, q.thread_id, nullif(q.entry_id, 0), q.cause, octet_length(q.messages)::bigint, q.hash, q.parked_at,
    q.thread_id IS NOT NULL AND q.base_id IS DISTINCT FROM b.applied_id
FROM {schema}.buffer_quarantine AS q
LEFT JOIN {schema}.buffer_threads AS b ON b.thread_id = q.thread_id
WHERE q.seq > $1::bigint AND ($2::text IS NULL OR q.thread_id = $2::text)
ORDER BY q.seq LIMIT $3::bigint
