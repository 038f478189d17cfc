-- The position up to which an archive has the log (see LogConfig.archive).
CREATE TABLE {schema}.buffer_archive (
    one      boolean PRIMARY KEY DEFAULT true CHECK (one),
    position bigint NOT NULL
);
