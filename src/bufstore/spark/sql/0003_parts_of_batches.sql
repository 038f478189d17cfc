-- Works with: 0001
-- What each part of a batch was when the first of its rows was written, so that other rows under its number are found
-- out. Of each app id, the parts of the batch that came last.
CREATE TABLE {schema}.spark_parts (
    app_id   text COLLATE "C" NOT NULL,
    part     integer NOT NULL,
    batch_id bigint NOT NULL,
    -- How many parts the batch is divided into, by a hash of the thread.
    parts    integer NOT NULL,
    -- A sum over the rows of this one.
    planned  bigint NOT NULL,
    PRIMARY KEY (app_id, part)
);
