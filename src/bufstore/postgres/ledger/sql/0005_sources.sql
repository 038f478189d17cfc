-- The highest number of each producer that writes to the thread: it shows a repeated write, however late that comes.
ALTER TABLE {schema}.buffer_threads ADD COLUMN sources bytea NOT NULL DEFAULT '';
