-- As load_rows, with the buffer's row for the thread.
SELECT -1 AS seq, r.record AS payload, t.version, t.parent_thread_id, t.latest_run_id, t.active_run_id, t.open_run_id,
    t.metadata, t.state,
    b.flushed_seq, b.applied_id, b.version AS known_version, b.ring, b.broken_since
FROM (SELECT $1::text COLLATE "C") AS wanted (thread_id)
LEFT JOIN {schema}.threads AS t ON t.thread_id = wanted.thread_id
LEFT JOIN {schema}.runs AS r ON r.run_id = t.latest_run_id
LEFT JOIN {schema}.buffer_threads AS b ON b.thread_id = wanted.thread_id
UNION ALL
SELECT m.seq, m.payload, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM {schema}.messages AS m WHERE m.thread_id = $1::text
