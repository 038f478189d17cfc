-- name: lock_lineage
-- One change of lineage at a time in a schema, until the transaction ends; of a process that stops in the middle, soon.
SELECT pg_advisory_xact_lock(hashtextextended('bufstore lineage ' || $1::text, 0)),
    set_config('idle_in_transaction_session_timeout', '10s', true);

-- name: children
-- The threads that have this one as parent.
SELECT thread_id FROM {schema}.threads WHERE parent_thread_id = $1::text ORDER BY thread_id;

-- name: erase_set_aside
-- Remove what jobs on Spark have set aside of these threads.
DELETE FROM {schema}.spark_quarantine WHERE thread_id = ANY ($1::text[]) RETURNING rank;
