-- Works with: 0010
-- The last log that is known to have existed: its generation and its stream. Null: an earlier release made it, or there
-- was none yet.
ALTER TABLE {schema}.buffer_log ADD COLUMN made int, ADD COLUMN made_stream text;
