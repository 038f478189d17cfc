-- Claiming the first dispatch is one statement. It does not rewrite the record: what the claim adds stands beside it.
ALTER TABLE {schema}.mailbox_dispatches ADD COLUMN claim bytea;

-- Outcome 1: claimed, now or by an earlier attempt at this step ($3). 0: the first dispatch is of an earlier epoch and
-- has to be removed first. 2: the thread has changed. No row: there is nothing to claim; this, the usual answer, takes
-- no lock.
CREATE FUNCTION {schema}.mailbox_claim_v1(text, bigint, text, bytea, bigint, text)
RETURNS TABLE (outcome int, of_version bigint, of_epoch bigint, d_record bytea, d_position bigint, d_epoch bigint, d_status int, d_token bigint, d_claim bytea)
LANGUAGE plpgsql SET enable_seqscan = off AS $body$
#variable_conflict use_column
DECLARE
    t {schema}.mailbox_threads;
    d {schema}.mailbox_dispatches;
    n bigint;
BEGIN
    SELECT * INTO t FROM {schema}.mailbox_threads WHERE thread_id = $1;
    IF t.step = $3 THEN
        RETURN QUERY SELECT 1, t.version, t.epoch, a.record, a.position, a.epoch, a.status, a.token, a.claim
        FROM {schema}.mailbox_dispatches a WHERE a.thread_id = $1 AND a.dispatch_id = t.active_id;
        RETURN;
    END IF;
    IF t.thread_id IS NULL OR t.active_id IS NOT NULL THEN
        RETURN;
    END IF;
    SELECT * INTO d FROM {schema}.mailbox_dispatches
    WHERE thread_id = $1 AND status = 0 AND available_at <= $2 ORDER BY priority, position LIMIT 1;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF d.epoch < t.epoch THEN
        RETURN QUERY SELECT 0, t.version, t.epoch, d.record, d.position, d.epoch, d.status, d.token, d.claim;
        RETURN;
    END IF;
    n := nextval($6::regclass);
    UPDATE {schema}.mailbox_threads SET version = n, step = $3, active_id = d.dispatch_id, lease_until = $5
    WHERE thread_id = $1 AND version = t.version;
    IF NOT FOUND THEN
        RETURN QUERY SELECT 2, t.version, t.epoch, d.record, d.position, d.epoch, d.status, d.token, d.claim;
        RETURN;
    END IF;
    -- The version guards the queue, too: what was first still is.
    UPDATE {schema}.mailbox_dispatches SET status = 1, token = n, claim = $4
    WHERE thread_id = $1 AND dispatch_id = d.dispatch_id;
    RETURN QUERY SELECT 1, n, t.epoch, d.record, d.position, d.epoch, 1, n, $4;
END
$body$;

-- As in 0002, except that a rewritten record is complete, so it clears `claim`.
CREATE OR REPLACE FUNCTION {schema}.mailbox_write_v1(text, bigint, bigint, text, text, bigint, bigint, text[], int[], int[], bigint[], bigint[], bigint[], bytea[], text)
RETURNS TABLE (new_version bigint, whole int)
LANGUAGE plpgsql SET enable_seqscan = off AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
WITH t AS (
    INSERT INTO {schema}.mailbox_threads AS t (thread_id, version, epoch, step, active_id, lease_until, wake_at)
    SELECT $1::text, n, CASE $3::bigint WHEN -1 THEN n ELSE $3::bigint END, $4::text, $5::text, $6::bigint, $7::bigint
    FROM nextval($15::text::regclass) AS n
    WHERE $2::bigint = 0 OR EXISTS (SELECT FROM {schema}.mailbox_threads WHERE thread_id = $1::text)
    ON CONFLICT (thread_id) DO UPDATE SET version = excluded.version, epoch = excluded.epoch, step = excluded.step,
        active_id = excluded.active_id, lease_until = excluded.lease_until, wake_at = least(t.wake_at, excluded.wake_at)
    WHERE t.version = $2::bigint
    RETURNING t.version
), m AS (
    UPDATE {schema}.mailbox_dispatches AS d SET status = m.status, available_at = m.available_at,
        completed_at = m.completed_at, record = m.record, claim = NULL,
        token = CASE m.token WHEN -1 THEN t.version ELSE m.token END
    FROM t, unnest($8::text[], $9::int[], $10::int[], $11::bigint[], $12::bigint[], $13::bigint[], $14::bytea[])
        AS m (dispatch_id, was, status, available_at, completed_at, token, record)
    WHERE d.thread_id = $1::text AND d.dispatch_id = m.dispatch_id AND d.status = m.was
    RETURNING 1
)
SELECT t.version, 1 / ((SELECT count(*) FROM m) = cardinality($8::text[]))::int FROM t;
END
$body$;
