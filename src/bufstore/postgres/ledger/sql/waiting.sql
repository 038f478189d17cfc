-- name: wait
-- Add entries that wait, behind those of their threads that wait already.
INSERT INTO {schema}.buffer_waiting (thread_id, seq, partition, entry_id, messages, reason)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::int[], $4::bigint[], $5::bytea[], $6::text[]);

-- name: leave
-- Remove the entries of each thread up to a position: they wait no more.
DELETE FROM {schema}.buffer_waiting AS w USING unnest($1::text[], $2::bigint[]) AS s (thread_id, seq)
WHERE w.thread_id = s.thread_id AND w.seq <= s.seq;

-- name: queues
-- The threads with waiting entries in a partition: the number of entries, their bytes, why they wait, and the last
-- position.
SELECT w.thread_id, count(*), sum(octet_length(w.messages)), min(w.reason), max(w.seq)
FROM {schema}.buffer_waiting AS w WHERE w.partition = $1::int GROUP BY w.thread_id ORDER BY min(w.seq);

-- name: first_waiting
-- The first waiting entries of each thread: $2 per thread at most, and $3 bytes at most in all (or one entry).
SELECT f.thread_id, f.seq, f.messages
FROM (
    SELECT w.*, sum(octet_length(w.messages)) OVER (ORDER BY s.place, w.seq) - octet_length(w.messages) AS before
    FROM unnest($1::text[]) WITH ORDINALITY AS s (thread_id, place)
    CROSS JOIN LATERAL (
        SELECT q.thread_id, q.seq, q.messages FROM {schema}.buffer_waiting AS q
        WHERE q.thread_id = s.thread_id ORDER BY q.seq LIMIT $2::bigint
    ) AS w
) AS f
WHERE f.before < $3::bigint ORDER BY f.thread_id, f.seq;

-- name: waiting_threads
-- Threads with waiting entries, a page at a time.
SELECT DISTINCT thread_id FROM {schema}.buffer_waiting WHERE thread_id > $1::text COLLATE "C"
ORDER BY thread_id LIMIT $2::bigint;

-- name: waiting_among
-- Which of these threads have waiting entries. Nearly always none has, so the question must cost next to nothing:
-- OFFSET 0 leaves the planner one way, through the index.
SELECT s.thread_id FROM unnest($1::text[]) AS s (thread_id)
WHERE EXISTS (SELECT FROM {schema}.buffer_waiting AS w WHERE w.thread_id = s.thread_id OFFSET 0);

-- name: waiting_totals
-- How much waits, since when, and the most common reason.
SELECT count(*), count(DISTINCT thread_id), coalesce(sum(octet_length(messages)), 0)::bigint, min(since),
    coalesce(mode() WITHIN GROUP (ORDER BY reason), '')
FROM {schema}.buffer_waiting;

-- name: flushed
-- For each partition, the position up to which everything is in the store or in quarantine.
SELECT p.partition, least(p.cursor_seq, (
    SELECT min(w.seq) - 1 FROM {schema}.buffer_waiting AS w WHERE w.partition = p.partition
))
FROM {schema}.buffer_partitions AS p;
