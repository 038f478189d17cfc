-- name: cursors_and_target
-- The cursor of each partition of a lane, and the log that is flushed into its tables.
SELECT
    (SELECT array_agg(p.partition ORDER BY p.partition) FROM {schema}.buffer_partitions AS p),
    (SELECT array_agg(p.cursor_seq ORDER BY p.partition) FROM {schema}.buffer_partitions AS p),
    l.domain, l.store, l.target
FROM (SELECT 1) AS one LEFT JOIN {schema}.buffer_log AS l ON true;

-- name: export_snapshot
-- The name under which other transactions can see the snapshot of this one.
SELECT pg_export_snapshot();

-- name: flushed_beyond
-- A thread of the share and of a lane that has been flushed up to this position or beyond.
SELECT b.thread_id, b.flushed_seq FROM {schema}.buffer_threads AS b
WHERE b.flushed_seq >= $3::bigint
    AND ('x' || encode(substring(sha256(convert_to(b.thread_id, 'UTF8')) FROM 1 FOR 4), 'hex'))::bit(32)::bigint
        BETWEEN $1::bigint AND $2::bigint
    AND ($4::text[] IS NULL OR b.thread_id = ANY ($4::text[]))
LIMIT 1;

-- name: waiting_of_share
-- The waiting entries of the share's threads of a lane, up to a position.
SELECT w.thread_id, w.seq, w.messages, (extract(epoch FROM w.since) * 1000000)::bigint
FROM {schema}.buffer_waiting AS w
WHERE w.seq < $3::bigint
    AND ('x' || encode(substring(sha256(convert_to(w.thread_id, 'UTF8')) FROM 1 FOR 4), 'hex'))::bit(32)::bigint
        BETWEEN $1::bigint AND $2::bigint
    AND ($4::text[] IS NULL OR w.thread_id = ANY ($4::text[]))
ORDER BY w.thread_id, w.seq;

-- name: thread_rows
-- These threads, without their messages, and without their rows in the buffer's tables.
SELECT s.thread_id, t.record, t.version, t.parent_thread_id, t.latest_run_id, t.active_run_id, t.open_run_id,
    t.metadata, t.state
FROM unnest($1::text[]) AS s (thread_id) CROSS JOIN LATERAL {schema}.thread_row_v2(s.thread_id, false) AS t;

-- name: thread_watermarks
-- The rows of these threads in the buffer's tables of their lane.
SELECT s.thread_id, b.flushed_seq, b.applied_id, b.version, b.ring, b.broken_since, b.sources,
    (SELECT max(w.seq) FROM {schema}.buffer_waiting AS w WHERE w.thread_id = s.thread_id)
FROM unnest($1::text[]) AS s (thread_id) LEFT JOIN {schema}.buffer_threads AS b ON b.thread_id = s.thread_id;

-- name: watermarks
-- The watermarks of a lane's threads.
SELECT thread_id, flushed_seq, broken_since FROM {schema}.buffer_threads;

-- name: threads_of_share
-- The threads of a share, optionally only those of some agents (as far as the encoded run tells) that were changed
-- between two times, with their watermarks, whichever lane has them.
SELECT t.thread_id, t.version, t.parent_thread_id, t.latest_run_id, t.active_run_id, t.open_run_id, t.metadata,
    t.state, r.record, b.flushed_seq, b.broken_since, (extract(epoch FROM t.updated_at) * 1000000)::bigint
FROM {schema}.threads AS t
LEFT JOIN {schema}.runs AS r ON r.run_id = t.latest_run_id
LEFT JOIN ({watermarks}) AS b ON b.thread_id = t.thread_id
WHERE ('x' || encode(substring(sha256(convert_to(t.thread_id, 'UTF8')) FROM 1 FOR 4), 'hex'))::bit(32)::bigint
        BETWEEN $1::bigint AND $2::bigint
    AND ($3::text[] IS NULL OR t.thread_id = ANY ($3::text[]))
    AND ($4::bytea[] IS NULL OR EXISTS (SELECT FROM unnest($4::bytea[]) AS a (agent) WHERE position(a.agent IN r.record) > 0))
    AND ($5::bigint IS NULL OR t.updated_at >= timestamptz 'epoch' + $5::bigint * interval '1 microsecond')
    AND ($6::bigint IS NULL OR t.updated_at < timestamptz 'epoch' + $6::bigint * interval '1 microsecond');

-- name: runs_of_share
-- The runs of a share, with the same conditions.
SELECT r.thread_id, r.record, (extract(epoch FROM r.updated_at) * 1000000)::bigint
FROM {schema}.runs AS r
WHERE ('x' || encode(substring(sha256(convert_to(r.thread_id, 'UTF8')) FROM 1 FOR 4), 'hex'))::bit(32)::bigint
        BETWEEN $1::bigint AND $2::bigint
    AND ($3::text[] IS NULL OR r.thread_id = ANY ($3::text[]))
    AND ($4::bytea[] IS NULL OR EXISTS (SELECT FROM unnest($4::bytea[]) AS a (agent) WHERE position(a.agent IN r.record) > 0))
    AND ($5::bigint IS NULL OR r.updated_at >= timestamptz 'epoch' + $5::bigint * interval '1 microsecond')
    AND ($6::bigint IS NULL OR r.updated_at < timestamptz 'epoch' + $6::bigint * interval '1 microsecond');

-- name: messages_of_share
-- The messages of a share's threads, with the thread's time. A message has no agent, so a search for agents finds none.
SELECT m.thread_id, m.seq, m.payload, (extract(epoch FROM t.updated_at) * 1000000)::bigint
FROM {schema}.threads AS t JOIN {schema}.messages AS m ON m.thread_id = t.thread_id
WHERE ('x' || encode(substring(sha256(convert_to(t.thread_id, 'UTF8')) FROM 1 FOR 4), 'hex'))::bit(32)::bigint
        BETWEEN $1::bigint AND $2::bigint
    AND ($3::text[] IS NULL OR t.thread_id = ANY ($3::text[]))
    AND $4::bytea[] IS NULL
    AND ($5::bigint IS NULL OR t.updated_at >= timestamptz 'epoch' + $5::bigint * interval '1 microsecond')
    AND ($6::bigint IS NULL OR t.updated_at < timestamptz 'epoch' + $6::bigint * interval '1 microsecond');

-- name: runs_of_threads
-- All runs of these threads.
SELECT r.thread_id, r.run_id, r.record, (extract(epoch FROM r.updated_at) * 1000000)::bigint
FROM {schema}.runs AS r WHERE r.thread_id = ANY ($1::text[]);

-- name: first_messages
-- The first n messages of each thread; n is given per thread.
SELECT m.thread_id, m.seq, m.payload
FROM unnest($1::text[], $2::int[]) AS s (thread_id, number)
JOIN {schema}.messages AS m ON m.thread_id = s.thread_id AND m.seq < s.number;
