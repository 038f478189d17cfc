-- A thread with its latest run (one row, seq -1, always there), and its messages, unsorted: one statement, one snapshot.
-- (Sorted here, the payloads would go through a sort that spills to disk.)
SELECT -1 AS seq, r.record AS payload, t.version, t.parent_thread_id, t.latest_run_id, t.active_run_id, t.open_run_id,
    t.metadata, t.state
FROM (SELECT $1::text COLLATE "C") AS wanted (thread_id)
LEFT JOIN {schema}.threads AS t ON t.thread_id = wanted.thread_id
LEFT JOIN {schema}.runs AS r ON r.run_id = t.latest_run_id
UNION ALL
SELECT m.seq, m.payload, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM {schema}.messages AS m WHERE m.thread_id = $1::text
