-- name: lock_quarantine
-- One session at a time counts the parked entries and adds to them: two flushers together must not exceed the limit.
-- Any row that is always there can serve as the lock.
SELECT epoch FROM {schema}.buffer_log FOR UPDATE;

-- name: quarantined
-- How many entries are parked.
SELECT count(*) FROM {schema}.buffer_quarantine;

-- name: park
-- Park entries. An entry that is parked already stays as it is.
INSERT INTO {schema}.buffer_quarantine (seq, hash, thread_id, entry_id, base_id, cause, messages)
SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::text[], $7::bytea[])
ON CONFLICT (seq) DO NOTHING;

-- name: parked_list
-- A page of the quarantine. The last column: whether the thread has gone on since the entry was parked (superseded).
SELECT q.seq, q.thread_id, nullif(q.entry_id, 0), q.cause, octet_length(q.messages)::bigint, q.hash, q.parked_at,
    q.thread_id IS NOT NULL AND q.base_id IS DISTINCT FROM b.applied_id
FROM {schema}.buffer_quarantine AS q
LEFT JOIN {schema}.buffer_threads AS b ON b.thread_id = q.thread_id
WHERE q.seq > $1::bigint AND ($2::text IS NULL OR q.thread_id = $2::text)
ORDER BY q.seq LIMIT $3::bigint;

-- name: parked_entry
-- One parked entry, whole.
SELECT seq, thread_id, base_id, cause, parked_at, messages FROM {schema}.buffer_quarantine WHERE seq = $1::bigint;

-- name: parked_at
-- Which of these positions are parked.
SELECT seq FROM {schema}.buffer_quarantine WHERE seq = ANY ($1::bigint[]);

-- name: parked_threads
-- Threads that have parked entries, a page at a time.
SELECT DISTINCT thread_id FROM {schema}.buffer_quarantine WHERE thread_id > $1::text COLLATE "C"
ORDER BY thread_id LIMIT $2::bigint;

-- name: parked_ends
-- The position of each thread's last parked entry.
SELECT thread_id, max(seq) FROM {schema}.buffer_quarantine WHERE thread_id IS NOT NULL GROUP BY thread_id;

-- name: parked_of_thread
-- The thread's parked entries from a position on, oldest first: $3 entries at most, and $4 bytes at most (or one
-- entry).
SELECT p.seq, p.thread_id, p.base_id, p.cause, p.parked_at, p.messages
FROM (
    SELECT q.*, sum(octet_length(q.messages)) OVER (ORDER BY q.seq) - octet_length(q.messages) AS before
    FROM (
        SELECT * FROM {schema}.buffer_quarantine
        WHERE thread_id = $1::text AND seq >= $2::bigint ORDER BY seq LIMIT $3::bigint
    ) AS q
) AS p
WHERE p.before < $4::bigint ORDER BY p.seq;

-- name: rebase_parked
-- What stays parked behind the last replayed entry now builds on that entry.
UPDATE {schema}.buffer_quarantine SET base_id = $4::bigint
WHERE thread_id = $1::text AND seq > $2::bigint AND base_id = $3::bigint;

-- name: unpark
-- Remove entries that were replayed or discarded, and return which of them were there.
DELETE FROM {schema}.buffer_quarantine WHERE seq = ANY ($1::bigint[]) RETURNING seq;

-- name: unpark_nameless
-- Remove entries whose thread is not known: nothing else depends on them.
DELETE FROM {schema}.buffer_quarantine WHERE seq = ANY ($1::bigint[]) AND thread_id IS NULL RETURNING seq;
