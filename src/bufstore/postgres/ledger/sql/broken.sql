-- Threads whose chain is broken; of each, entries wait in quarantine, which is bounded. OFFSET 0 leaves the planner one
-- way, through the index: with no or old statistics it would read all threads.
SELECT b.thread_id
FROM (SELECT DISTINCT thread_id FROM {schema}.buffer_quarantine WHERE thread_id IS NOT NULL) AS q
CROSS JOIN LATERAL (
    SELECT t.thread_id FROM {schema}.buffer_threads AS t
    WHERE t.thread_id = q.thread_id AND t.broken_since IS NOT NULL OFFSET 0
) AS b
