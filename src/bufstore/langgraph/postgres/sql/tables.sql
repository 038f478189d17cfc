-- name: version
-- The last of LangGraph's own migrations of its tables; null: there are none.
SELECT max(v) FROM {schema}.checkpoint_migrations;

-- name: has_migrations
-- Whether LangGraph's tables were ever made here.
SELECT count(*) = 1 FROM pg_tables WHERE schemaname = $1::text AND tablename = 'checkpoint_migrations';

-- name: has_schema
-- Whether the schema is there: CREATE SCHEMA IF NOT EXISTS needs the right to create one even then.
SELECT count(*) = 1 FROM pg_namespace WHERE nspname = $1::text;

-- name: create_schema
-- The schema.
CREATE SCHEMA {schema};

-- name: create_migrations
-- The five of LangGraph's tables and indexes as its migration 9 leaves them, for a database that has none of them.
CREATE TABLE {schema}.checkpoint_migrations (v integer PRIMARY KEY);

-- name: create_checkpoints
-- See create_migrations.
CREATE TABLE {schema}.checkpoints (
    thread_id text NOT NULL,
    checkpoint_ns text NOT NULL DEFAULT '',
    checkpoint_id text NOT NULL,
    parent_checkpoint_id text,
    type text,
    checkpoint jsonb NOT NULL,
    metadata jsonb NOT NULL DEFAULT '{}',
    PRIMARY KEY (thread_id, checkpoint_ns, checkpoint_id)
);

-- name: create_blobs
-- See create_migrations.
CREATE TABLE {schema}.checkpoint_blobs (
    thread_id text NOT NULL,
    checkpoint_ns text NOT NULL DEFAULT '',
    channel text NOT NULL,
    version text NOT NULL,
    type text NOT NULL,
    blob bytea,
    PRIMARY KEY (thread_id, checkpoint_ns, channel, version)
);

-- name: create_writes
-- See create_migrations.
CREATE TABLE {schema}.checkpoint_writes (
    thread_id text NOT NULL,
    checkpoint_ns text NOT NULL DEFAULT '',
    checkpoint_id text NOT NULL,
    task_id text NOT NULL,
    idx integer NOT NULL,
    channel text NOT NULL,
    type text,
    blob bytea NOT NULL,
    task_path text NOT NULL DEFAULT '',
    PRIMARY KEY (thread_id, checkpoint_ns, checkpoint_id, task_id, idx)
);

-- name: create_checkpoints_index
-- See create_migrations.
CREATE INDEX checkpoints_thread_id_idx ON {schema}.checkpoints (thread_id);

-- name: create_blobs_index
-- See create_migrations.
CREATE INDEX checkpoint_blobs_thread_id_idx ON {schema}.checkpoint_blobs (thread_id);

-- name: create_writes_index
-- See create_migrations.
CREATE INDEX checkpoint_writes_thread_id_idx ON {schema}.checkpoint_writes (thread_id);

-- name: record_migrations
-- LangGraph's saver finds nothing left to do.
INSERT INTO {schema}.checkpoint_migrations (v) SELECT generate_series(0, 9);
