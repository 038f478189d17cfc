-- Works with: 0003
-- Like thread_row_v1, which earlier releases use. With the buffer's row it also returns the position of the thread's
-- last waiting entry, as of the same moment.
CREATE FUNCTION {schema}.thread_row_v2(
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
    OUT sources bytea,
    OUT waits_to bigint
) LANGUAGE plpgsql STABLE SET enable_seqscan = off AS $body$
#variable_conflict use_column
BEGIN
    SELECT t.version, t.parent_thread_id, t.latest_run_id, t.active_run_id, t.open_run_id, t.metadata, t.state
    INTO version, parent_thread_id, latest_run_id, active_run_id, open_run_id, metadata, state
    FROM {schema}.threads AS t WHERE t.thread_id = p_thread;
    SELECT r.record INTO record FROM {schema}.runs AS r WHERE r.run_id = thread_row_v2.latest_run_id;
    IF p_watermark THEN
        SELECT b.flushed_seq, b.applied_id, b.version, b.ring, b.broken_since, b.sources
        INTO flushed_seq, applied_id, known_version, ring, broken_since, sources
        FROM {schema}.buffer_threads AS b WHERE b.thread_id = p_thread;
        SELECT max(w.seq) INTO waits_to FROM {schema}.buffer_waiting AS w WHERE w.thread_id = p_thread;
    END IF;
END
$body$;
