-- Every flush moves the watermarks of its threads. With the watermark in an index, even one of tombstones only,
-- Postgres could not update a row in place: each flush of a thread cost a new entry in every index, and its WAL.
CREATE INDEX buffer_threads_gone ON {schema}.buffer_threads (thread_id) WHERE gone;
DROP INDEX {schema}.buffer_threads_flushed_seq_idx;
