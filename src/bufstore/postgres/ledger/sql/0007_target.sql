-- Works with: 0006
-- Where the log is flushed to: this database, under an id that the log has too, and what is flushed into it.
ALTER TABLE {schema}.buffer_log
    ADD COLUMN domain text,
    ADD COLUMN store text,
    ADD COLUMN target text;
