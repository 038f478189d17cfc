-- Works with: 0001
-- What is known about a batch before it is done: it shows when the batch comes again with other rows.
ALTER TABLE {schema}.spark_sources
    -- Spark's id of the query's run; empty where Spark does not tell.
    ADD COLUMN run_id text NOT NULL DEFAULT '',
    -- The batch to which the next columns refer. If batch_id differs, an earlier release has begun that batch.
    ADD COLUMN noted_batch bigint,
    -- A checksum of its rows. NULL: not noted, or the batch ended with bad rows, which may be corrected.
    ADD COLUMN planned bigint,
    ADD COLUMN done boolean NOT NULL DEFAULT false,
    -- If the batch ended with bad rows: which of its rows were written (bufstore.spark.sink.settled).
    ADD COLUMN settled bytea,
    -- How long its writes were held up because nothing got through.
    ADD COLUMN waited_ms bigint;
-- Rows that differ only in what text cannot hold (null, NUL) are different rows.
ALTER TABLE {schema}.spark_quarantine
    DROP CONSTRAINT spark_quarantine_pkey,
    ADD COLUMN id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- Identifies the row in every attempt. (A row that an earlier release sets aside twice is here twice.)
    ADD COLUMN key bytea NOT NULL DEFAULT uuid_send(gen_random_uuid()) UNIQUE,
    -- The row's number among all replays, set when its first replay begins.
    ADD COLUMN replay bigint;
CREATE INDEX spark_quarantine_thread ON {schema}.spark_quarantine (thread_id);
CREATE SEQUENCE {schema}.spark_replays;
