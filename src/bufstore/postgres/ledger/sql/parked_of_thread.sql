-- The thread's parked entries from a position on, oldest first: at most so many, and at most so many bytes (or one).
SELECT p.seq, p.thread_id, p.base_id, p.cause, p.parked_at, p.messages
FROM (
    SELECT q.*, sum(octet_length(q.messages)) OVER (ORDER BY q.seq) - octet_length(q.messages) AS before
    FROM (
        SELECT * FROM {schema}.buffer_quarantine
        WHERE thread_id = $1::text AND seq >= $2::bigint ORDER BY seq LIMIT $3::bigint
    ) AS q
) AS p
WHERE p.before < $4::bigint ORDER BY p.seq
