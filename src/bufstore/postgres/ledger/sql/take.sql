-- A new owner: raise the terms, which fences every earlier one. A row that somebody holds is left out, and not waited
-- for: the other partitions need not wait for that one.
WITH free AS (
    SELECT p.partition FROM {schema}.buffer_partitions AS p
    WHERE p.partition = ANY ($1::int[]) ORDER BY p.partition FOR UPDATE SKIP LOCKED
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
SELECT * FROM raised UNION ALL SELECT * FROM made
