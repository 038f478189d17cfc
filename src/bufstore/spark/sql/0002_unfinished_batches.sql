-- Works with: 0001
-- What is known of a batch before it is done, so that other rows under its number are found out.
ALTER TABLE {schema}.spark_sources
    -- Spark's id of the query's run; empty where Spark does not tell.
    ADD COLUMN run_id text NOT NULL DEFAULT '',
    -- The batch that the next columns are about; another than batch_id: an earlier release has begun that one.
    ADD COLUMN noted_batch bigint,
    -- A sum over its rows, from before the first one was written. NULL: it ended with bad rows, which may be corrected.
    ADD COLUMN planned bigint,
    ADD COLUMN done boolean NOT NULL DEFAULT false,
    -- Of a batch that ended with bad rows: which of its rows are written (bufstore.spark.sink.settled).
    ADD COLUMN settled bytea,
    -- How long nothing of it got through.
    ADD COLUMN waited_ms bigint;
-- Rows that differ only in what text cannot hold (null, NUL) are different rows.
ALTER TABLE {schema}.spark_quarantine
    DROP CONSTRAINT spark_quarantine_pkey,
    ADD COLUMN id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- The same for each try of one row. (What an earlier release sets aside twice, is here twice.)
    ADD COLUMN key bytea NOT NULL DEFAULT uuid_send(gen_random_uuid()) UNIQUE,
    -- Its number among all replays, once one has begun with it.
    ADD COLUMN replay bigint;
CREATE INDEX spark_quarantine_thread ON {schema}.spark_quarantine (thread_id);
CREATE SEQUENCE {schema}.spark_replays;
