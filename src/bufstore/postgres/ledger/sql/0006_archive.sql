-- Up to which position an archive has the log (see BufferConfig.archive).
CREATE TABLE {schema}.buffer_archive (
    one      boolean PRIMARY KEY DEFAULT true CHECK (one),
    position bigint NOT NULL
);
