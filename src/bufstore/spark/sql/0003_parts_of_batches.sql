-- Works with: 0001
-- Each part of a batch, noted before its first row is written: it shows when the batch comes again with other rows.
-- Only the parts of each app id's latest batch are kept.
CREATE TABLE {schema}.spark_parts (
    app_id   text COLLATE "C" NOT NULL,
    part     integer NOT NULL,
    batch_id bigint NOT NULL,
    -- The number of parts into which a hash of the thread divides the batch.
    parts    integer NOT NULL,
    -- A checksum of this part's rows.
    planned  bigint NOT NULL,
    PRIMARY KEY (app_id, part)
);
