-- Of a deleted thread the row stays, to keep what is delivered or replayed again from taking effect, until the log has
-- purged past it.
ALTER TABLE {schema}.buffer_threads ADD COLUMN gone boolean NOT NULL DEFAULT false;
CREATE INDEX ON {schema}.buffer_threads (flushed_seq) WHERE gone;
