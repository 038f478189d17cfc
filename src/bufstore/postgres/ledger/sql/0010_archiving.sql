-- Works with: 0009
-- The position up to which a run that has begun may put the log into an archive, whatever becomes of the run.
ALTER TABLE {schema}.buffer_archive ADD COLUMN begun bigint NOT NULL DEFAULT 0;
