-- The mailbox: threads, who works on each, and their dispatches.

-- Versions, tokens, epochs and positions: numbers that never come twice.
CREATE SEQUENCE {schema}.mailbox_numbers;

-- Of each thread: the version that steps compare and set, the claim, and when a worker should look at the thread.
CREATE TABLE {schema}.mailbox_threads (
    thread_id text COLLATE "C" PRIMARY KEY,
    version bigint NOT NULL,
    epoch bigint NOT NULL DEFAULT 0,
    step text NOT NULL DEFAULT '',
    active_id text COLLATE "C",
    lease_until bigint,
    wake_at bigint,
    wakes int NOT NULL DEFAULT 0,
    enqueued bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 70);
CREATE INDEX mailbox_leases ON {schema}.mailbox_threads (lease_until) WHERE lease_until IS NOT NULL;
CREATE INDEX mailbox_wakes ON {schema}.mailbox_threads (wake_at) WHERE wake_at IS NOT NULL;

-- Status: 0 queued, 1 claimed, 2 and above finished. The record holds everything; the columns are for searching.
CREATE TABLE {schema}.mailbox_dispatches (
    thread_id text COLLATE "C" NOT NULL,
    dispatch_id text COLLATE "C" NOT NULL,
    position bigint NOT NULL,
    priority int NOT NULL,
    epoch bigint NOT NULL,
    status int NOT NULL,
    available_at bigint NOT NULL,
    dedupe_key text COLLATE "C",
    token bigint NOT NULL DEFAULT 0,
    completed_at bigint,
    record bytea NOT NULL,
    CONSTRAINT mailbox_dispatch PRIMARY KEY (thread_id, dispatch_id)
) WITH (fillfactor = 70);
CREATE INDEX mailbox_queue ON {schema}.mailbox_dispatches (thread_id, priority, position) WHERE status = 0;
CREATE UNIQUE INDEX mailbox_dedupe ON {schema}.mailbox_dispatches (thread_id, dedupe_key)
    WHERE status < 2 AND dedupe_key IS NOT NULL;
CREATE INDEX mailbox_finished ON {schema}.mailbox_dispatches (completed_at, position) WHERE completed_at IS NOT NULL;

-- When somebody last swept: a single row.
CREATE TABLE {schema}.mailbox_sweep (only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one), swept_at timestamptz NOT NULL);
INSERT INTO {schema}.mailbox_sweep VALUES (true, '-infinity');
