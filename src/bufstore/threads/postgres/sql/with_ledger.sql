-- name: load_state_of_lane
-- Like load_state with the buffer's row, for a lane, whose ledger has a schema of its own.
SELECT -1 AS seq, t.record, t.version, t.parent_thread_id, t.latest_run_id, t.active_run_id, t.open_run_id, t.metadata,
    t.state, b.flushed_seq, b.applied_id, b.version AS known_version, b.ring, b.broken_since, b.sources,
    (SELECT max(w.seq) FROM {ledger}.buffer_waiting AS w WHERE w.thread_id = $1::text)
FROM {schema}.thread_row_v2($1::text, false) AS t
LEFT JOIN {ledger}.buffer_threads AS b ON b.thread_id = $1::text
UNION ALL
SELECT m.seq, m.payload, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM {schema}.messages AS m WHERE m.thread_id = $1::text;

-- name: counts
-- For the self-check: what the buffer's row says about each thread, and what this store holds of it, as of one moment.
SELECT b.thread_id, b.version, t.version::bigint, (
    SELECT count(*) FROM {schema}.messages AS m WHERE m.thread_id = b.thread_id
)
FROM {ledger}.buffer_threads AS b
LEFT JOIN {schema}.threads AS t ON t.thread_id = b.thread_id
WHERE b.thread_id = ANY ($1::text[]) AND b.applied_id <> 0;
