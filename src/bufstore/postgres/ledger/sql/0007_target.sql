-- Works with: 0006
-- Where the log is flushed to: what its entries mean, the kind of store, and an id of this database, which the log also
-- has.
ALTER TABLE {schema}.buffer_log
    ADD COLUMN domain text,
    ADD COLUMN store text,
    ADD COLUMN target text;
