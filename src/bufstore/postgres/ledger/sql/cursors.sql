-- name: cursors
-- Each partition's cursor, and its owner's term.
SELECT partition, term, cursor_seq, cursor_id FROM {schema}.buffer_partitions ORDER BY partition;

-- name: take
-- A new owner: raise the terms, which fences every earlier owner. Rows that another session holds are skipped, so that
-- the other partitions need not wait for them. The setting tells a trigger that this release knows of waiting entries.
WITH free AS (
    SELECT p.partition
    FROM {schema}.buffer_partitions AS p, (SELECT set_config('bufstore.knows_waiting', 'yes', true)) AS settings
    WHERE p.partition = ANY ($1::int[]) ORDER BY p.partition FOR UPDATE OF p SKIP LOCKED
), raised AS (
    UPDATE {schema}.buffer_partitions AS p SET term = p.term + 1, owner = $2::text
    FROM free WHERE p.partition = free.partition
    RETURNING p.partition, p.term, p.cursor_seq, p.cursor_id
), made AS (
    INSERT INTO {schema}.buffer_partitions AS p (partition, term, owner, cursor_seq, cursor_id)
    SELECT s.partition, 1, $2::text, 0, 0
    FROM unnest($1::int[]) AS s (partition), set_config('lock_timeout', '1s', true) ORDER BY s.partition
    ON CONFLICT DO NOTHING
    RETURNING p.partition, p.term, p.cursor_seq, p.cursor_id
)
SELECT * FROM raised UNION ALL SELECT * FROM made;

-- name: lock_partitions
-- The partitions of a flush, locked until its commit. The settings end with the transaction, too: a process that stops
-- in the middle (frozen, or its host is gone) does not hold its locks for long.
-- The advisory lock tells others that this is a flush, and for how many milliseconds it may stand still: see
-- open_flushes. Nobody waits for that lock. Its first number is arbitrary, but fixed.
SELECT p.partition, p.term, p.cursor_seq, p.cursor_id, p.owner
FROM {schema}.buffer_partitions AS p, (
    SELECT set_config('idle_in_transaction_session_timeout', $2::text, true),
        set_config('tcp_user_timeout', $2::text, true),
        pg_advisory_xact_lock_shared(1651861107, $2::int)
) AS settings
WHERE p.partition = ANY ($1::int[]) ORDER BY p.partition FOR UPDATE OF p;

-- name: open_flush
-- Marks the transaction of a flush (see still_open), which does not wait long for a lock. That stands in a statement of
-- its own, because the next one waits already for who has locked the whole table.
SELECT set_config('bufstore.flush', 'open', true), set_config('lock_timeout', $1::text, true);

-- name: still_open
-- Whether this is the transaction that the flush, or a replay, began with: the setting ends with it.
SELECT coalesce(current_setting('bufstore.flush', true), '') = 'open';

-- name: open_flushes
-- The open transactions of flushes into these tables: for how long each may stand still, and for how long it has stood
-- still within a pipeline. There the session is active and waits for its client, and the time counts from the start of
-- its last statement. Between statements the session is idle (0), and Postgres' own limit applies. Null: the session
-- belongs to another role, and ours may not see its state.
SELECT f.pid, f.virtualtransaction, a.usename::text, (f.objid::bigint / 1000.0)::float8, (
    CASE WHEN a.query_start IS NULL THEN NULL
    WHEN a.state <> 'active' OR a.wait_event_type IS DISTINCT FROM 'Client' THEN 0
    ELSE extract(epoch FROM clock_timestamp() - a.query_start) END
)::float8, coalesce(a.query_start::text, '')
FROM pg_locks AS f
JOIN pg_locks AS t USING (pid, virtualtransaction, database)
JOIN pg_stat_activity AS a USING (pid)
WHERE f.locktype = 'advisory' AND f.classid = 1651861107 AND f.objsubid = 2 AND a.datname = current_database()
    AND t.locktype = 'relation' AND t.mode = 'RowShareLock'
    AND t.relation = (SELECT p.tableoid FROM {schema}.buffer_partitions AS p LIMIT 1);

-- name: end_flush
-- End the session of a flush if it is still in that transaction: behind a pooler, another client may use it by now.
SELECT pg_terminate_backend(f.pid) FROM pg_locks AS f
WHERE f.pid = $1::int AND f.virtualtransaction = $2::text
    AND f.locktype = 'advisory' AND f.classid = 1651861107 AND f.objsubid = 2;

-- name: advance_cursors
-- The last statement of a flush: the new cursors of its partitions. The term is the one that was locked.
UPDATE {schema}.buffer_partitions AS p SET cursor_seq = s.cursor_seq, cursor_id = s.cursor_id, term = s.term
FROM unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[]) AS s (partition, cursor_seq, cursor_id, term)
WHERE p.partition = s.partition;
