-- What the buffer knows about threads, partitions and the log.

-- One row per thread: its watermark (flushed_seq, applied_id) and what travels with the chain.
CREATE TABLE {schema}.buffer_threads (
    thread_id text COLLATE "C" PRIMARY KEY,
    flushed_seq bigint NOT NULL,
    applied_id bigint NOT NULL,
    version bigint NOT NULL,
    ring bytea NOT NULL,
    broken_since bigint
) WITH (fillfactor = 80);

-- One row per partition: everything up to the cursor is applied, parked or waiting. Only the holder of the term may
-- commit.
CREATE TABLE {schema}.buffer_partitions (
    partition int PRIMARY KEY,
    term bigint NOT NULL,
    owner text NOT NULL,
    cursor_seq bigint NOT NULL,
    cursor_id bigint NOT NULL
) WITH (fillfactor = 50);

-- The generation of the stream that all positions belong to: one row.
CREATE TABLE {schema}.buffer_log (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    epoch int NOT NULL
);

-- Poison, whole: the messages as they stand in the log, so that they can be replayed.
CREATE TABLE {schema}.buffer_quarantine (
    seq bigint PRIMARY KEY,
    hash text NOT NULL,
    thread_id text COLLATE "C",
    entry_id bigint,
    cause text NOT NULL,
    messages bytea NOT NULL,
    parked_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX ON {schema}.buffer_quarantine (thread_id, seq);
