-- name: delete_threads
-- Delete whole threads. Later statements of the batch may write some of them again.
WITH gone AS (SELECT unnest($1::text[]) AS thread_id),
writes AS (DELETE FROM {schema}.checkpoint_writes AS w USING gone WHERE w.thread_id = gone.thread_id),
blobs AS (DELETE FROM {schema}.checkpoint_blobs AS b USING gone WHERE b.thread_id = gone.thread_id)
DELETE FROM {schema}.checkpoints AS c USING gone WHERE c.thread_id = gone.thread_id;

-- name: drop_namespaces
-- Delete all rows of these namespaces.
WITH gone AS (SELECT * FROM unnest($1::text[], $2::text[]) AS s (thread_id, ns)),
writes AS (
    DELETE FROM {schema}.checkpoint_writes AS w USING gone
    WHERE w.thread_id = gone.thread_id AND w.checkpoint_ns = gone.ns
),
blobs AS (
    DELETE FROM {schema}.checkpoint_blobs AS b USING gone
    WHERE b.thread_id = gone.thread_id AND b.checkpoint_ns = gone.ns
)
DELETE FROM {schema}.checkpoints AS c USING gone WHERE c.thread_id = gone.thread_id AND c.checkpoint_ns = gone.ns;

-- name: drop_checkpoints
-- Delete these checkpoints and their writes. A checkpoint that stays loses a parent that is deleted. (NOT IN is looked up
-- in a hash table. For NOT EXISTS the planner, which takes unnest for few rows, went through all of them for each.)
WITH gone AS (SELECT * FROM unnest($1::text[], $2::text[], $3::text[]) AS s (thread_id, ns, id)),
writes AS (
    DELETE FROM {schema}.checkpoint_writes AS w USING gone
    WHERE w.thread_id = gone.thread_id AND w.checkpoint_ns = gone.ns AND w.checkpoint_id = gone.id
),
orphans AS (
    UPDATE {schema}.checkpoints AS c SET parent_checkpoint_id = NULL FROM gone
    WHERE c.thread_id = gone.thread_id AND c.checkpoint_ns = gone.ns AND c.parent_checkpoint_id = gone.id
        AND (c.thread_id, c.checkpoint_ns, c.checkpoint_id) NOT IN (SELECT g.thread_id, g.ns, g.id FROM gone AS g)
)
DELETE FROM {schema}.checkpoints AS c USING gone
WHERE c.thread_id = gone.thread_id AND c.checkpoint_ns = gone.ns AND c.checkpoint_id = gone.id;

-- name: drop_blobs
-- Delete blobs that no checkpoint names any more.
DELETE FROM {schema}.checkpoint_blobs AS b
USING unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS s (thread_id, ns, channel, version)
WHERE b.thread_id = s.thread_id AND b.checkpoint_ns = s.ns AND b.channel = s.channel AND b.version = s.version;

-- name: put_blobs
-- Blobs. The value of a channel's version never changes.
INSERT INTO {schema}.checkpoint_blobs (thread_id, checkpoint_ns, channel, version, type, blob)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[])
ON CONFLICT (thread_id, checkpoint_ns, channel, version) DO NOTHING;

-- name: put_checkpoints
-- Checkpoints. One that is there already keeps its parent.
INSERT INTO {schema}.checkpoints (
    thread_id, checkpoint_ns, checkpoint_id, parent_checkpoint_id, checkpoint, metadata
)
SELECT s.thread_id, s.ns, s.id, s.parent,
    convert_from(s.checkpoint, 'UTF8')::jsonb, convert_from(s.metadata, 'UTF8')::jsonb
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::bytea[])
    AS s (thread_id, ns, id, parent, checkpoint, metadata)
ON CONFLICT (thread_id, checkpoint_ns, checkpoint_id) DO UPDATE SET
    checkpoint = excluded.checkpoint,
    metadata = excluded.metadata;

-- name: put_writes
-- Writes of tasks, where the first write of an index counts.
INSERT INTO {schema}.checkpoint_writes (
    thread_id, checkpoint_ns, checkpoint_id, task_id, idx, channel, type, blob, task_path
)
SELECT * FROM unnest(
    $1::text[], $2::text[], $3::text[], $4::text[], $5::int[], $6::text[], $7::text[], $8::bytea[], $9::text[]
)
ON CONFLICT (thread_id, checkpoint_ns, checkpoint_id, task_id, idx) DO NOTHING;

-- name: replace_writes
-- Writes of tasks, where the last write of an index counts.
INSERT INTO {schema}.checkpoint_writes (
    thread_id, checkpoint_ns, checkpoint_id, task_id, idx, channel, type, blob, task_path
)
SELECT * FROM unnest(
    $1::text[], $2::text[], $3::text[], $4::text[], $5::int[], $6::text[], $7::text[], $8::bytea[], $9::text[]
)
ON CONFLICT (thread_id, checkpoint_ns, checkpoint_id, task_id, idx) DO UPDATE SET
    channel = excluded.channel,
    type = excluded.type,
    blob = excluded.blob;
