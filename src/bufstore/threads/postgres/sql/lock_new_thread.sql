-- A row that does not exist cannot be locked: make it first. One row if it is new.
INSERT INTO {schema}.threads (thread_id) VALUES ($1::text) ON CONFLICT DO NOTHING RETURNING true
