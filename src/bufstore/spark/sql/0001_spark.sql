-- The streaming queries that write checkpoints: the query that owns each app id, and its progress.
CREATE TABLE {schema}.spark_sources (
    app_id      text COLLATE "C" PRIMARY KEY,
    -- Spark's id of the query, which lives in its checkpoint folder; empty where Spark does not tell (Connect).
    query_id    text NOT NULL,
    -- The batch that was begun last.
    batch_id    bigint NOT NULL,
    -- A checksum of that batch's rows, set once the batch is done: a repeat must have the same rows.
    fingerprint bigint,
    rows        bigint,
    repeated    bigint,
    bad         bigint,
    done_at     timestamptz
);
-- Rows that could not become checkpoints.
CREATE TABLE {schema}.spark_quarantine (
    app_id     text COLLATE "C" NOT NULL,
    batch_id   bigint NOT NULL,
    -- The row, as JSON, and its place among its thread's rows in the batch.
    thread_id  text COLLATE "C" NOT NULL,
    rank       bigint NOT NULL,
    row        text NOT NULL,
    cause      text NOT NULL,
    parked_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (app_id, batch_id, thread_id, rank)
);
