-- Streaming queries that write checkpoints: which query has the name, and how far it has come.
CREATE TABLE {schema}.spark_sources (
    app_id   text COLLATE "C" PRIMARY KEY,
    -- Spark's id of the query, which lives in its checkpoint folder; empty where Spark does not tell (Connect).
    query_id text NOT NULL,
    batch_id bigint NOT NULL
);
