CREATE TABLE {schema}.threads (
    thread_id        text COLLATE "C" PRIMARY KEY,
    -- Number of messages.
    version          int NOT NULL DEFAULT 0,
    -- No foreign keys: partitions flush on their own, a child may come before its parent.
    parent_thread_id text COLLATE "C",
    latest_run_id    text COLLATE "C",
    active_run_id    text COLLATE "C",
    open_run_id      text COLLATE "C",
    -- The rest is for checkpoints written straight to Postgres: a count of them, the random id of the last one,
    -- and for each of the last 16 the hash of its idempotency key (8 bytes) and of its content (4 bytes).
    saves            bigint NOT NULL DEFAULT 0,
    last_id          bigint NOT NULL DEFAULT 0,
    ring             bytea NOT NULL DEFAULT '',
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at       timestamptz NOT NULL DEFAULT clock_timestamp()
-- Room in each page for the next version of a row: updated in place, without touching the index.
) WITH (fillfactor = 80);

CREATE TABLE {schema}.messages (
    thread_id text COLLATE "C" NOT NULL,
    seq       int NOT NULL,
    payload   bytea NOT NULL,
    -- Hash of the message's id, if it has one: any id fits, whatever its length and characters.
    id_hash   bigint,
    -- With the hash in it, a look for repeated ids reads the index of one thread, and no second index is kept.
    PRIMARY KEY (thread_id, seq) INCLUDE (id_hash)
-- Rows of up to 8 KB stay in the table as they are. The default (2 KB) would compress messages of common size and
-- move them into a second table with a second index: two to three times slower to write.
) WITH (toast_tuple_target = 8160);

CREATE TABLE {schema}.runs (
    run_id     text COLLATE "C" PRIMARY KEY,
    thread_id  text COLLATE "C" NOT NULL,
    record     bytea NOT NULL,
    status     text COLLATE "C" NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 80);

-- A run keeps its thread. Called where an upsert meets another thread's run; it names nobody.
CREATE FUNCTION {schema}.run_taken() RETURNS bytea LANGUAGE plpgsql AS $body$
BEGIN
    RAISE unique_violation USING MESSAGE = 'a run id belongs to another thread', TABLE = 'runs';
END
$body$;

-- One checkpoint, as one statement. What is refused is said in `outcome` and nothing is stored.
CREATE FUNCTION {schema}.checkpoint_v1(
    p_thread text,      -- thread id
    p_append boolean,   -- true: the messages are appended; false: they are the whole list
    p_expected int,     -- version that the thread must have, or null
    p_payloads bytea[],
    p_hashes bigint[],  -- id_hash of each message
    p_run text,         -- run id, record, status, parent thread
    p_record bytea,
    p_status text,
    p_parent text,
    p_key bytea,        -- hash of the idempotency key: 8 bytes
    p_content bytea,    -- hash of the content: 4 bytes
    p_id bigint,        -- the receipt's random id
    OUT outcome text, OUT saves bigint, OUT last_id bigint, OUT version int
) LANGUAGE plpgsql AS $body$
DECLARE
    t {schema}.threads;
    found_thread boolean;
    base int;
BEGIN
    -- The lock on the thread's row serializes its writers. A row that does not exist cannot be locked: it is
    -- inserted, after the checks so that a refusal leaves no empty thread; who loses that race starts again.
    LOOP
        SELECT * INTO t FROM {schema}.threads AS x WHERE x.thread_id = p_thread FOR UPDATE;
        found_thread := FOUND;
        IF found_thread AND position(p_key IN t.ring) > 0 THEN
            FOR i IN 0 .. length(t.ring) / 12 - 1 LOOP
                IF substring(t.ring FROM i * 12 + 1 FOR 8) = p_key THEN
                    outcome := CASE WHEN substring(t.ring FROM i * 12 + 9 FOR 4) = p_content
                               THEN 'repeated' ELSE 'other content' END;
                END IF;
            END LOOP;
        END IF;
        version := coalesce(t.version, 0);
        base := CASE WHEN p_append THEN version ELSE 0 END;
        IF outcome IS NOT NULL THEN
            NULL;
        ELSIF EXISTS (SELECT FROM {schema}.runs AS r WHERE r.run_id = p_run AND r.thread_id <> p_thread) THEN
            outcome := 'run taken';
        ELSIF p_expected <> version THEN
            outcome := 'version conflict';
        ELSIF p_append AND version > 0 AND EXISTS (
            SELECT FROM {schema}.messages AS m WHERE m.thread_id = p_thread AND m.id_hash = ANY (p_hashes)
        ) THEN
            outcome := 'message exists';
        END IF;
        IF outcome IS NOT NULL THEN
            saves := t.saves;
            last_id := t.last_id;
            RETURN;
        END IF;
        EXIT WHEN found_thread;
        INSERT INTO {schema}.threads (thread_id) VALUES (p_thread) ON CONFLICT (thread_id) DO NOTHING;
        IF FOUND THEN
            t.ring := '';
            EXIT;
        END IF;
    END LOOP;

    IF base = 0 THEN
        -- Only what differs is written. (ON CONFLICT … WHERE alone would lock, and so rewrite, every row.)
        INSERT INTO {schema}.messages (thread_id, seq, payload, id_hash)
        SELECT p_thread, given.n - 1, given.payload, given.id_hash
        FROM unnest(p_payloads, p_hashes) WITH ORDINALITY AS given (payload, id_hash, n)
        LEFT JOIN {schema}.messages AS m ON m.thread_id = p_thread AND m.seq = given.n - 1
        WHERE m.payload IS DISTINCT FROM given.payload
        ON CONFLICT (thread_id, seq) DO UPDATE SET payload = excluded.payload, id_hash = excluded.id_hash;
    ELSE
        INSERT INTO {schema}.messages (thread_id, seq, payload, id_hash)
        SELECT p_thread, base + given.n - 1, given.payload, given.id_hash
        FROM unnest(p_payloads, p_hashes) WITH ORDINALITY AS given (payload, id_hash, n);
    END IF;
    base := base + cardinality(p_payloads);
    IF base < version THEN
        DELETE FROM {schema}.messages AS m WHERE m.thread_id = p_thread AND m.seq >= base;
    END IF;

    INSERT INTO {schema}.runs AS r (run_id, thread_id, record, status)
    VALUES (p_run, p_thread, p_record, p_status)
    ON CONFLICT (run_id) DO UPDATE SET
        -- Another thread's, though it was not there above: inserted in between.
        record = CASE WHEN r.thread_id = excluded.thread_id THEN excluded.record ELSE {schema}.run_taken() END,
        status = excluded.status,
        updated_at = clock_timestamp();

    UPDATE {schema}.threads AS x SET
        version = base,
        parent_thread_id = coalesce(x.parent_thread_id, p_parent),
        latest_run_id = p_run,
        active_run_id = CASE p_status WHEN 'running' THEN p_run WHEN 'done' THEN nullif(x.active_run_id, p_run) END,
        open_run_id = CASE p_status WHEN 'done' THEN nullif(x.open_run_id, p_run) ELSE p_run END,
        saves = x.saves + 1,
        last_id = p_id,
        ring = substring(t.ring FROM greatest(1, length(t.ring) - 15 * 12 + 1)) || p_key || p_content,
        updated_at = clock_timestamp()
    WHERE x.thread_id = p_thread
    RETURNING x.saves INTO saves;
    outcome := 'stored';
    last_id := p_id;
    version := base;
END
$body$;
