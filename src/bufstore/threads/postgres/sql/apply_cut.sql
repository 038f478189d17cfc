-- Messages beyond the new end of their thread. OFFSET 0 and ctid leave the planner one way, through the index:
-- with no or old statistics it would read the whole table for a few threads.
DELETE FROM {schema}.messages WHERE ctid = ANY (ARRAY(
    SELECT beyond.ctid
    FROM unnest($1::text[], $2::int[]) AS s (thread_id, version)
    CROSS JOIN LATERAL (
        SELECT m.ctid FROM {schema}.messages AS m WHERE m.thread_id = s.thread_id AND m.seq >= s.version OFFSET 0
    ) AS beyond
))
