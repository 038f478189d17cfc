-- A thread with its latest run (one row, seq -1, always there), and its messages, unsorted: one statement, one snapshot.
-- (Sorted here, the payloads would go through a sort that spills to disk.) $2: with the buffer's row for the thread.
SELECT -1 AS seq, t.* FROM {schema}.thread_row_v1($1::text, $2::boolean) AS t
UNION ALL
SELECT m.seq, m.payload, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM {schema}.messages AS m WHERE m.thread_id = $1::text
