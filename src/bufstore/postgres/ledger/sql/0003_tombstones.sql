-- The row of a deleted thread stays until the log has been purged past it, so that what is delivered or replayed again
-- has no effect.
ALTER TABLE {schema}.buffer_threads ADD COLUMN gone boolean NOT NULL DEFAULT false;
CREATE INDEX ON {schema}.buffer_threads (flushed_seq) WHERE gone;
