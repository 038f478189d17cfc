ALTER TABLE {schema}.threads
    -- The metadata, encoded, and what of it is searched for.
    ADD COLUMN metadata bytea,
    ADD COLUMN resource_id text COLLATE "C",
    -- What the app keeps with the thread, encoded.
    ADD COLUMN state bytea;

-- For pages of threads: all, those of a resource, the children of a thread.
CREATE INDEX threads_by_change ON {schema}.threads (updated_at DESC, thread_id);
CREATE INDEX threads_by_resource ON {schema}.threads (resource_id, updated_at DESC, thread_id)
    WHERE resource_id IS NOT NULL;
CREATE INDEX threads_by_parent ON {schema}.threads (parent_thread_id, updated_at DESC, thread_id)
    WHERE parent_thread_id IS NOT NULL;

-- For pages of runs: all, those of a thread, those in a status.
CREATE INDEX runs_by_creation ON {schema}.runs (created_at, run_id);
CREATE INDEX runs_by_thread ON {schema}.runs (thread_id, created_at, run_id);
CREATE INDEX runs_by_status ON {schema}.runs (status, created_at, run_id);
