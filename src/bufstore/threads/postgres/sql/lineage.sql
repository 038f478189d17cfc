-- name: lock_lineage
-- Lets one change of lineage at a time run in a schema, until the transaction ends, which is soon if the process stops
-- in the middle.
SELECT pg_advisory_xact_lock(hashtextextended('bufstore lineage ' || $1::text, 0)),
    set_config('idle_in_transaction_session_timeout', '10s', true);

-- name: children
-- The threads that have this one as parent.
SELECT thread_id FROM {schema}.threads WHERE parent_thread_id = $1::text ORDER BY thread_id;

-- name: erase_set_aside
-- Delete the rows of these threads that jobs on Spark have set aside.
DELETE FROM {schema}.spark_quarantine WHERE thread_id = ANY ($1::text[]) RETURNING rank;
