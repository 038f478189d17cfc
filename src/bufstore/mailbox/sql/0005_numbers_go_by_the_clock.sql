-- Works with: 0003
-- Numbers go by the server's clock: the sequence goes back with a database that is restored, or that fails over to a
-- copy which lagged.

-- Raise the sequence to the clock, in microseconds since 1970, if it is more than a second behind. It has the owner's
-- rights, because an app may take numbers and not set them.
-- No raise may undo another one, or take back numbers that were given meanwhile. So one raises at a time, and who finds
-- the sequence behind waits; the second is for who took a number just before. The error gives the lock back at once
-- (what setval did stays). A lock until the statement's end would have others wait while it waits for a thread's row.
CREATE FUNCTION {schema}.mailbox_raise_v1() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, {schema}, pg_temp AS $body$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('bufstore mailbox numbers ' || 'mailbox_numbers'::regclass::oid, 0));
    PERFORM setval('mailbox_numbers', clock.now) FROM {schema}.mailbox_numbers
    CROSS JOIN (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now) AS clock
    WHERE last_value < clock.now - 1000000;
    RAISE SQLSTATE 'BUFST';
EXCEPTION
    WHEN SQLSTATE 'BUFST' THEN
        NULL;
    WHEN insufficient_privilege THEN
        NULL;  -- the sequence is not the owner's: its numbers are as before
END
$body$;

-- The next number of the sequence with this name. It is taken where the statement takes it, and not before: who waits
-- for a restore to end then has the restored sequence.
CREATE FUNCTION {schema}.mailbox_number_v1(text) RETURNS bigint
LANGUAGE plpgsql AS $body$
DECLARE
    n bigint := nextval($1::regclass);
BEGIN
    IF n < extract(epoch FROM clock_timestamp()) * 1000000 - 1000000 THEN
        PERFORM {schema}.mailbox_raise_v1();
        n := nextval($1::regclass);
    END IF;
    RETURN n;
END
$body$;

-- As in 0002, with this number.
CREATE OR REPLACE FUNCTION {schema}.mailbox_add_v1(text, text, int, text, bigint, bytea, text, bigint)
RETURNS TABLE (new_position bigint, of_epoch bigint)
LANGUAGE plpgsql SET enable_seqscan = off AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
WITH t AS (
    INSERT INTO {schema}.mailbox_threads AS t (thread_id, version, wake_at)
    VALUES ($1::text, {schema}.mailbox_number_v1($7), $8::bigint)
    ON CONFLICT (thread_id) DO UPDATE SET wake_at = least(t.wake_at, excluded.wake_at), enqueued = t.enqueued + 1
    RETURNING t.epoch
)
INSERT INTO {schema}.mailbox_dispatches
    (thread_id, dispatch_id, position, priority, epoch, status, available_at, dedupe_key, record)
SELECT $1::text, $2::text, {schema}.mailbox_number_v1($7), $3::int, t.epoch, 0, $5::bigint, $4::text, $6::bytea FROM t
RETURNING position, epoch;
END
$body$;

-- As in 0003, with this number.
CREATE OR REPLACE FUNCTION {schema}.mailbox_claim_v1(text, bigint, text, bytea, bigint, text)
RETURNS TABLE (outcome int, of_version bigint, of_epoch bigint,
    d_record bytea, d_position bigint, d_epoch bigint, d_status int, d_token bigint, d_claim bytea)
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
    n := {schema}.mailbox_number_v1($6);
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

-- As in 0003, with this number.
CREATE OR REPLACE FUNCTION {schema}.mailbox_write_v1(
    text, bigint, bigint, text, text, bigint, bigint,
    text[], int[], int[], bigint[], bigint[], bigint[], bytea[], text
)
RETURNS TABLE (new_version bigint, whole int)
LANGUAGE plpgsql SET enable_seqscan = off AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
WITH t AS (
    INSERT INTO {schema}.mailbox_threads AS t (thread_id, version, epoch, step, active_id, lease_until, wake_at)
    SELECT $1::text, n, CASE $3::bigint WHEN -1 THEN n ELSE $3::bigint END, $4::text, $5::text, $6::bigint, $7::bigint
    FROM {schema}.mailbox_number_v1($15) AS n
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

-- As in 0004, with this number.
CREATE OR REPLACE FUNCTION {schema}.mailbox_signal_lost_v1(text, int, bigint, bigint, text)
RETURNS TABLE (looked_at text, signalled boolean)
LANGUAGE plpgsql SET enable_seqscan = off AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
WITH RECURSIVE queued AS (
    (SELECT thread_id, 1 AS n FROM {schema}.mailbox_dispatches
        WHERE status = 0 AND thread_id > $1 COLLATE "C" ORDER BY thread_id LIMIT 1)
    UNION ALL
    SELECT d.thread_id, q.n + 1 FROM queued q CROSS JOIN LATERAL (
        SELECT thread_id FROM {schema}.mailbox_dispatches
        WHERE status = 0 AND thread_id > q.thread_id ORDER BY thread_id LIMIT 1
    ) d WHERE q.n < $2
), lost AS (
    INSERT INTO {schema}.mailbox_threads AS t (thread_id, version, wake_at)
    SELECT q.thread_id, {schema}.mailbox_number_v1($5), $3 FROM queued q
    LEFT JOIN {schema}.mailbox_threads t ON t.thread_id = q.thread_id
    WHERE t.active_id IS NULL AND (t.wake_at IS NULL OR t.wake_at > $4) AND EXISTS (
        SELECT FROM {schema}.mailbox_dispatches d
        WHERE d.thread_id = q.thread_id AND d.status = 0 AND d.available_at <= $3
    )
    ON CONFLICT (thread_id) DO UPDATE SET wake_at = excluded.wake_at
    WHERE t.active_id IS NULL AND (t.wake_at IS NULL OR t.wake_at > $4)
    RETURNING t.thread_id
)
SELECT q.thread_id, EXISTS (SELECT FROM lost l WHERE l.thread_id = q.thread_id) FROM queued q ORDER BY q.thread_id;
END
$body$;

-- Whoever may call the functions that were there before may call what they call now. Else, where new functions are not
-- for everybody, workers of earlier releases would stop, and going back to an earlier release would not help them.
DO $body$
DECLARE
    grant_it text;
BEGIN
    FOR grant_it IN
        SELECT DISTINCT format(
            'GRANT EXECUTE ON FUNCTION %1$I.mailbox_number_v1(text), %1$I.mailbox_raise_v1() TO %2$s',
            n.nspname, CASE acl.grantee WHEN 0 THEN 'PUBLIC' ELSE acl.grantee::regrole::text END
        )
        FROM pg_type AS t
        JOIN pg_namespace AS n ON n.oid = t.typnamespace
        JOIN pg_proc AS p ON p.pronamespace = n.oid AND p.proname = 'mailbox_add_v1'
        CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS acl
        WHERE t.oid = pg_typeof(NULL::{schema}.mailbox_threads)
    LOOP
        EXECUTE grant_it;
    END LOOP;
END
$body$;
