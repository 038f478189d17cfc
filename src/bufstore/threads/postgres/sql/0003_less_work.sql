-- Threads by change, newest first, now read backwards: what has changed last then goes to the index's right end, which
-- fills its pages and splits one without moving half of it.
CREATE INDEX threads_by_last_change ON {schema}.threads (updated_at, thread_id DESC);
DROP INDEX {schema}.threads_by_change;

-- A thread's row with its latest run and, if asked for, the buffer's row for it. A function, because Postgres plans each
-- statement anew (a pooler in transaction mode forbids prepared ones) but keeps the plans of a function: planning these
-- lookups took longer than reading a hundred messages. STABLE: it sees what the statement that calls it sees, so both
-- are of one moment. A plan kept from when the tables were small must not read them whole: hence no enable_seqscan.
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
