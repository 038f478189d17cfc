-- Threads by their last change. A page of the newest reads this index backwards: what changed last goes to its right
-- end, where pages are filled, and split without half of their entries being moved.
CREATE INDEX threads_by_last_change ON {schema}.threads (updated_at, thread_id DESC);
DROP INDEX {schema}.threads_by_change;

-- A thread's row with its latest run and, if asked for, the buffer's row for it. This is a function because Postgres
-- keeps the plans of a function, while it plans each statement anew (a pooler in transaction mode forbids prepared
-- statements): planning these lookups took longer than reading a hundred messages. STABLE: it sees what the calling
-- statement sees, so both are of one moment. Without enable_seqscan, a plan that was made when the tables were small
-- does not read them whole later.
CREATE FUNCTION {schema}.thread_row_v1(
    p_thread text,
    p_watermark boolean,
    OUT record bytea,
    OUT version int,
    OUT parent_thread_id text,
    OUT latest_run_id text,
    OUT active_run_id text,
    OUT open_run_id text,
    OUT metadata bytea,
    OUT state bytea,
    OUT flushed_seq bigint,
    OUT applied_id bigint,
    OUT known_version bigint,
    OUT ring bytea,
    OUT broken_since bigint,
    OUT sources bytea
) LANGUAGE plpgsql STABLE SET enable_seqscan = off AS $body$
#variable_conflict use_column
BEGIN
    SELECT t.version, t.parent_thread_id, t.latest_run_id, t.active_run_id, t.open_run_id, t.metadata, t.state
    INTO version, parent_thread_id, latest_run_id, active_run_id, open_run_id, metadata, state
    FROM {schema}.threads AS t WHERE t.thread_id = p_thread;
    SELECT r.record INTO record FROM {schema}.runs AS r WHERE r.run_id = thread_row_v1.latest_run_id;
    IF p_watermark THEN
        SELECT b.flushed_seq, b.applied_id, b.version, b.ring, b.broken_since, b.sources
        INTO flushed_seq, applied_id, known_version, ring, broken_since, sources
        FROM {schema}.buffer_threads AS b WHERE b.thread_id = p_thread;
    END IF;
END
$body$;
