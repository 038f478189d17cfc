-- The highest number of each source that writes to the thread: how a repeat is known, however much later it comes.
ALTER TABLE {schema}.buffer_threads ADD COLUMN sources bytea NOT NULL DEFAULT '';
