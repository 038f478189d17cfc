-- name: lock_lineage
-- Lets one change of lineage at a time run in a schema, until the transaction ends, which is soon if the process stops
-- in the middle.
SELECT pg_advisory_xact_lock(hashtextextended('bufstore lineage ' || $1::text, 0)),
    set_config('idle_in_transaction_session_timeout', '10s', true);

-- name: lock_lineage_below
-- Lock, as above, if there is the thread that is to be a parent, which is returned. No change of lineage makes a thread:
-- nobody has to wait for one to learn that the parent is missing.
SELECT p.there, set_config('idle_in_transaction_session_timeout', '10s', true),
    (SELECT pg_advisory_xact_lock(hashtextextended('bufstore lineage ' || $1::text, 0)) WHERE p.there)
FROM (SELECT EXISTS (SELECT FROM {schema}.threads WHERE thread_id = $2::text) AS there) AS p;

-- name: children
-- The threads that have this one as parent.
SELECT thread_id FROM {schema}.threads WHERE parent_thread_id = $1::text ORDER BY thread_id;

-- name: erase_set_aside
-- Delete the rows of these threads that jobs on Spark have set aside.
DELETE FROM {schema}.spark_quarantine WHERE thread_id = ANY ($1::text[]) RETURNING rank;
