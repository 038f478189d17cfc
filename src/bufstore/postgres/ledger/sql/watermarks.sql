-- name: row
-- The watermark of one thread, and the position of its last waiting entry.
SELECT b.flushed_seq, b.applied_id, b.version, b.ring, b.broken_since, b.gone, b.sources, (
    SELECT max(w.seq) FROM {schema}.buffer_waiting AS w WHERE w.thread_id = $1::text
)
FROM (SELECT $1::text AS thread_id) AS s LEFT JOIN {schema}.buffer_threads AS b ON b.thread_id = s.thread_id;

-- name: rows
-- The watermarks of threads, each with the position up to which entries of the thread were discarded and the position
-- of its last waiting entry. Threads of which only waiting entries are known are included.
SELECT s.thread_id, coalesce(b.given_up, 0), b.flushed_seq, b.applied_id, b.version, b.ring, b.broken_since, b.gone,
    b.sources, w.seq
FROM unnest($1::text[]) AS s (thread_id)
LEFT JOIN {schema}.buffer_threads AS b ON b.thread_id = s.thread_id
CROSS JOIN LATERAL (SELECT max(q.seq) AS seq FROM {schema}.buffer_waiting AS q WHERE q.thread_id = s.thread_id) AS w
WHERE b.thread_id IS NOT NULL OR w.seq IS NOT NULL;

-- name: insert_missing
-- A row that does not exist cannot be locked, so it is inserted first. Sorted, so that two flushes never deadlock.
INSERT INTO {schema}.buffer_threads (thread_id, flushed_seq, applied_id, version, ring)
SELECT s.thread_id, 0, 0, 0, '' FROM unnest($1::text[]) AS s (thread_id) ORDER BY s.thread_id COLLATE "C"
ON CONFLICT DO NOTHING;

-- name: lock_threads
-- The watermarks of a flush, locked until its commit. Rows that another session holds are skipped: those threads wait,
-- and the others need not.
SELECT thread_id, flushed_seq, applied_id, version, ring, broken_since, gone, sources
FROM {schema}.buffer_threads WHERE thread_id = ANY ($1::text[]) ORDER BY thread_id FOR UPDATE SKIP LOCKED;

-- name: lock_thread
-- The thread's row, so that neither a flush nor another replay changes it meanwhile. For the settings see
-- lock_partitions.
SELECT flushed_seq, applied_id, version, ring, broken_since, gone, sources, set_config('lock_timeout', '5s', true),
    set_config('idle_in_transaction_session_timeout', $2::text, true), set_config('bufstore.flush', 'open', true)
FROM {schema}.buffer_threads WHERE thread_id = $1::text FOR UPDATE;

-- name: advance_threads
-- The watermarks after a flush or a replay, written in the transaction that applies the entries.
UPDATE {schema}.buffer_threads AS b SET
    flushed_seq = s.flushed_seq,
    applied_id = s.applied_id,
    version = s.version,
    ring = s.ring,
    broken_since = nullif(s.broken_since, 0),
    gone = s.gone <> 0,
    sources = s.sources
FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bytea[], $6::bigint[], $7::int[], $8::bytea[])
    AS s (thread_id, flushed_seq, applied_id, version, ring, broken_since, gone, sources)
WHERE b.thread_id = s.thread_id;

-- name: broken
-- Threads whose chain is broken. Each has entries in quarantine, which is bounded. OFFSET 0 leaves the planner one way,
-- through the index: with no or old statistics it would read all threads.
SELECT b.thread_id
FROM (SELECT DISTINCT thread_id FROM {schema}.buffer_quarantine WHERE thread_id IS NOT NULL) AS q
CROSS JOIN LATERAL (
    SELECT t.thread_id FROM {schema}.buffer_threads AS t
    WHERE t.thread_id = q.thread_id AND t.broken_since IS NOT NULL OFFSET 0
) AS b;

-- name: mend_thread
-- The chain is broken from the first parked entry that builds on the last applied one; without such an entry it is
-- whole.
UPDATE {schema}.buffer_threads AS b SET broken_since = (
    SELECT min(q.seq) FROM {schema}.buffer_quarantine AS q
    WHERE q.thread_id = b.thread_id AND q.base_id = b.applied_id
)
WHERE b.thread_id = $1::text;

-- name: give_up
-- Remember the position up to which entries of the thread were discarded.
UPDATE {schema}.buffer_threads SET given_up = greatest(given_up, $2::bigint) WHERE thread_id = $1::text;

-- name: tombstones
-- Rows of deleted threads below a position, a page at a time.
SELECT thread_id, flushed_seq FROM {schema}.buffer_threads
WHERE gone AND sources = '' AND flushed_seq < $1::bigint AND thread_id > $2::text COLLATE "C"
ORDER BY thread_id LIMIT $3::bigint;

-- name: bury
-- Remove rows of deleted threads. The row stays if the thread has entries in quarantine, because a replay must find
-- that the thread has gone on; if a producer has written to it, because the same write may come again at any time and
-- must not bring the thread back; and if it has waiting entries, which build on what the row says.
DELETE FROM {schema}.buffer_threads AS b
USING unnest($1::text[], $2::bigint[]) AS s (thread_id, flushed_seq)
WHERE b.thread_id = s.thread_id AND b.gone AND b.flushed_seq = s.flushed_seq AND b.sources = ''
    AND NOT EXISTS (SELECT FROM {schema}.buffer_quarantine AS q WHERE q.thread_id = b.thread_id)
    AND NOT EXISTS (SELECT FROM {schema}.buffer_waiting AS w WHERE w.thread_id = b.thread_id);
