-- Threads by change, newest first, now read backwards: what has changed last then goes to the index's right end, which
-- fills its pages and splits one without moving half of it.
CREATE INDEX threads_by_last_change ON {schema}.threads (updated_at, thread_id DESC);
DROP INDEX {schema}.threads_by_change;
