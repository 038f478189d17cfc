-- name: cursors
-- Each partition's cursor, and its owner's term.
SELECT partition, term, cursor_seq, cursor_id FROM {schema}.buffer_partitions ORDER BY partition;

-- name: take
-- A new owner: raise the terms, which fences every earlier one. A row that somebody holds is left out, and not waited
-- for: the other partitions need not wait for that one. A trigger is told that this release knows of waiting entries.
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
-- The partitions of a flush, held until its commit. The settings end with the transaction, too: nobody waits long for a
-- lock, and a process that stops in the middle (it is frozen, or its host is gone) holds none for long.
SELECT p.partition, p.term, p.cursor_seq, p.cursor_id, p.owner
FROM {schema}.buffer_partitions AS p, (
    SELECT set_config('lock_timeout', $3::text, true),
        set_config('idle_in_transaction_session_timeout', $2::text, true),
        set_config('tcp_user_timeout', $2::text, true)
) AS settings
WHERE p.partition = ANY ($1::int[]) ORDER BY p.partition FOR UPDATE OF p;

-- name: advance_cursors
-- The last statement of a flush: where its partitions stand now. The term is the one that was locked.
UPDATE {schema}.buffer_partitions AS p SET cursor_seq = s.cursor_seq, cursor_id = s.cursor_id, term = s.term
FROM unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[]) AS s (partition, cursor_seq, cursor_id, term)
WHERE p.partition = s.partition;
