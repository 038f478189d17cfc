-- name: version
-- The last of LangGraph's own migrations of its tables; null: there are none.
SELECT max(v) FROM {schema}.checkpoint_migrations;

-- name: state
-- The watermark of one thread, the position of its last waiting entry, and whether the tables have anything of it.
SELECT b.flushed_seq, b.applied_id, b.version, b.ring, b.broken_since, b.gone, b.sources,
    (SELECT max(w.seq) FROM {buffer}.buffer_waiting AS w WHERE w.thread_id = $1::text),
    EXISTS (SELECT FROM {schema}.checkpoints AS c WHERE c.thread_id = $1::text)
    OR EXISTS (SELECT FROM {schema}.checkpoint_writes AS w WHERE w.thread_id = $1::text)
FROM (SELECT $1::text AS thread_id) AS s LEFT JOIN {buffer}.buffer_threads AS b ON b.thread_id = s.thread_id;

-- name: latest
-- The newest checkpoint of a namespace with its blobs and writes, and the writes of later checkpoints that are not
-- there yet. For a checkpoint of an old version also what was sent to it, which is stored with its parent. Then the
-- thread's namespaces, $3 at most: each takes one step through the index, however many checkpoints it has. Last, what
-- `state` returns. Always one row. LIMIT 1 keeps a subquery apart, here and below, so that each row is found through the
-- primary key: on tables that were not analyzed since they were small, Postgres takes a thread for a few rows, and a
-- join may go through all of them for each row that it looks for. (Writes have no key of one row. Of a thread without
-- statistics they are gone through once, which is better than once for each checkpoint, as subqueries would.)
-- (in_order: where the database's order would show another checkpoint as the newest, the thread's checkpoints are
-- sorted.)
SELECT b.flushed_seq, b.applied_id, b.version, b.ring, b.broken_since, b.gone, b.sources,
    c.checkpoint_id, c.parent_checkpoint_id, c.checkpoint::text, c.metadata::text, blobs.*, writes.*, (
        WITH RECURSIVE found (ns) AS (
            (
                SELECT n.checkpoint_ns FROM {schema}.checkpoints AS n
                WHERE n.thread_id = $1::text ORDER BY n.checkpoint_ns LIMIT 1
            )
            UNION ALL
            SELECT (
                SELECT n.checkpoint_ns FROM {schema}.checkpoints AS n
                WHERE n.thread_id = $1::text AND n.checkpoint_ns > f.ns ORDER BY n.checkpoint_ns LIMIT 1
            )
            FROM found AS f WHERE f.ns IS NOT NULL
        )
        SELECT coalesce(array_agg(few.ns), '{}')
        FROM (SELECT f.ns FROM found AS f WHERE f.ns IS NOT NULL LIMIT $3::bigint) AS few
    ),
    (SELECT max(w.seq) FROM {buffer}.buffer_waiting AS w WHERE w.thread_id = $1::text),
    EXISTS (SELECT FROM {schema}.checkpoints AS o WHERE o.thread_id = $1::text)
    OR EXISTS (SELECT FROM {schema}.checkpoint_writes AS w WHERE w.thread_id = $1::text)
FROM (SELECT $1::text AS thread_id) AS s
LEFT JOIN {buffer}.buffer_threads AS b ON b.thread_id = s.thread_id
LEFT JOIN LATERAL (
    SELECT n.checkpoint_id, n.parent_checkpoint_id, n.checkpoint, n.metadata FROM {schema}.checkpoints AS n
    WHERE n.thread_id = $1::text AND n.checkpoint_ns = $2::text
    ORDER BY CASE WHEN {in_order} THEN n.checkpoint_id END DESC,
        CASE WHEN NOT {in_order} THEN n.checkpoint_id COLLATE "C" END DESC
    LIMIT 1
) AS c ON true
CROSS JOIN LATERAL (
    SELECT array_agg(found.channel), array_agg(found.version), array_agg(found.type), array_agg(found.blob)
    FROM jsonb_each_text(c.checkpoint -> 'channel_versions') AS v
    CROSS JOIN LATERAL (
        SELECT x.channel, x.version, x.type, x.blob FROM {schema}.checkpoint_blobs AS x
        WHERE x.thread_id = $1::text AND x.checkpoint_ns = $2::text AND x.channel = v.key AND x.version = v.value
        LIMIT 1
    ) AS found
) AS blobs
CROSS JOIN LATERAL (
    SELECT array_agg(x.checkpoint_id), array_agg(x.task_id), array_agg(x.idx), array_agg(x.channel),
        array_agg(x.type), array_agg(x.blob), array_agg(x.task_path)
    FROM {schema}.checkpoint_writes AS x
    WHERE x.thread_id = $1::text AND x.checkpoint_ns = $2::text AND (
        CASE WHEN {in_order} THEN x.checkpoint_id >= coalesce(c.checkpoint_id, '')
            ELSE x.checkpoint_id COLLATE "C" >= coalesce(c.checkpoint_id, '')
        END
        OR (
            (c.checkpoint ->> 'v')::int < 4 AND x.checkpoint_id = c.parent_checkpoint_id
            AND x.channel = '__pregel_tasks'
        )
    )
) AS writes;

-- name: one
-- A checkpoint by its id, like `latest`, but without namespaces, and only with its own writes and what was sent to it.
SELECT b.flushed_seq, b.applied_id, b.version, b.ring, b.broken_since, b.gone, b.sources,
    c.checkpoint_id, c.parent_checkpoint_id, c.checkpoint::text, c.metadata::text, blobs.*, writes.*,
    (SELECT max(w.seq) FROM {buffer}.buffer_waiting AS w WHERE w.thread_id = $1::text),
    EXISTS (SELECT FROM {schema}.checkpoints AS o WHERE o.thread_id = $1::text)
    OR EXISTS (SELECT FROM {schema}.checkpoint_writes AS w WHERE w.thread_id = $1::text)
FROM (SELECT $1::text AS thread_id) AS s
LEFT JOIN {buffer}.buffer_threads AS b ON b.thread_id = s.thread_id
LEFT JOIN {schema}.checkpoints AS c
    ON c.thread_id = $1::text AND c.checkpoint_ns = $2::text AND c.checkpoint_id = $3::text
CROSS JOIN LATERAL (
    SELECT array_agg(found.channel), array_agg(found.version), array_agg(found.type), array_agg(found.blob)
    FROM jsonb_each_text(c.checkpoint -> 'channel_versions') AS v
    CROSS JOIN LATERAL (
        SELECT x.channel, x.version, x.type, x.blob FROM {schema}.checkpoint_blobs AS x
        WHERE x.thread_id = $1::text AND x.checkpoint_ns = $2::text AND x.channel = v.key AND x.version = v.value
        LIMIT 1
    ) AS found
) AS blobs
CROSS JOIN LATERAL (
    SELECT array_agg(x.checkpoint_id), array_agg(x.task_id), array_agg(x.idx), array_agg(x.channel),
        array_agg(x.type), array_agg(x.blob), array_agg(x.task_path)
    FROM {schema}.checkpoint_writes AS x
    WHERE x.thread_id = $1::text AND x.checkpoint_ns = $2::text AND (
        x.checkpoint_id = $3::text
        OR (
            (c.checkpoint ->> 'v')::int < 4 AND x.checkpoint_id = c.parent_checkpoint_id
            AND x.channel = '__pregel_tasks'
        )
    )
) AS writes;

-- name: ancestors
-- A checkpoint and its ancestors, $5 at most, with their blobs and writes of the channels $4, back to where each
-- channel has a stored value (`stored`: the channels that have met one already). Always one row.
WITH RECURSIVE chain (id, parent, checkpoint, stored, values, depth) AS (
    SELECT NULL::text, $3::text, NULL::jsonb, '{}'::text[], '{}'::text[], 0
    UNION ALL
    SELECT c.checkpoint_id, c.parent_checkpoint_id, c.checkpoint, p.stored || p.values, here.found, p.depth + 1
    FROM chain AS p
    CROSS JOIN LATERAL (
        SELECT n.checkpoint_id, n.parent_checkpoint_id, n.checkpoint FROM {schema}.checkpoints AS n
        WHERE n.thread_id = $1::text AND n.checkpoint_ns = $2::text AND n.checkpoint_id = p.parent LIMIT 1
    ) AS c
    CROSS JOIN LATERAL (
        SELECT ARRAY(
            SELECT k.channel FROM unnest($4::text[]) AS k (channel)
            WHERE k.channel <> ALL (p.stored || p.values) AND (
                c.checkpoint -> 'channel_values' ? k.channel OR (
                    SELECT x.type FROM {schema}.checkpoint_blobs AS x
                    WHERE x.thread_id = $1::text AND x.checkpoint_ns = $2::text AND x.channel = k.channel
                        AND x.version = c.checkpoint -> 'channel_versions' ->> k.channel
                    LIMIT 1
                ) <> 'empty'
            )
        )
    ) AS here (found)
    WHERE p.depth < $5::bigint AND NOT (p.stored || p.values) @> $4::text[]
)
SELECT b.flushed_seq, b.applied_id, b.version, b.ring, b.broken_since, b.gone, b.sources,
    checkpoints.*, blobs.*, writes.*
FROM (SELECT $1::text AS thread_id) AS s
LEFT JOIN {buffer}.buffer_threads AS b ON b.thread_id = s.thread_id
CROSS JOIN LATERAL (
    SELECT array_agg(a.id), array_agg(a.parent), array_agg(a.checkpoint::text) FROM chain AS a
    WHERE a.depth > 0
) AS checkpoints
CROSS JOIN LATERAL (
    SELECT array_agg(v.channel), array_agg(v.version), array_agg(v.type), array_agg(v.blob)
    FROM chain AS a
    CROSS JOIN LATERAL unnest(a.values) AS k (channel)
    CROSS JOIN LATERAL (
        SELECT x.channel, x.version, x.type, x.blob FROM {schema}.checkpoint_blobs AS x
        WHERE x.thread_id = $1::text AND x.checkpoint_ns = $2::text AND x.channel = k.channel
            AND x.version = a.checkpoint -> 'channel_versions' ->> k.channel
        LIMIT 1
    ) AS v
) AS blobs
CROSS JOIN LATERAL (
    SELECT array_agg(x.checkpoint_id), array_agg(x.task_id), array_agg(x.idx), array_agg(x.channel),
        array_agg(x.type), array_agg(x.blob), array_agg(x.task_path)
    FROM chain AS a
    JOIN {schema}.checkpoint_writes AS x ON x.checkpoint_id = a.id
    WHERE x.thread_id = $1::text AND x.checkpoint_ns = $2::text AND x.channel = ANY ($4::text[])
        AND x.channel <> ALL (a.stored)
) AS writes;

-- name: rows
-- Blobs by their keys ($2 to $4), and the writes of checkpoints ($5 and $6). Always one row.
SELECT b.flushed_seq, b.applied_id, b.version, b.ring, b.broken_since, b.gone, b.sources, blobs.*, writes.*
FROM (SELECT $1::text AS thread_id) AS s
LEFT JOIN {buffer}.buffer_threads AS b ON b.thread_id = s.thread_id
CROSS JOIN LATERAL (
    SELECT array_agg(k.ns), array_agg(k.channel), array_agg(k.version), array_agg(found.type), array_agg(found.blob)
    FROM unnest($2::text[], $3::text[], $4::text[]) AS k (ns, channel, version)
    CROSS JOIN LATERAL (
        SELECT x.type, x.blob FROM {schema}.checkpoint_blobs AS x
        WHERE x.thread_id = $1::text AND x.checkpoint_ns = k.ns AND x.channel = k.channel AND x.version = k.version
        LIMIT 1
    ) AS found
) AS blobs
CROSS JOIN LATERAL (
    SELECT array_agg(x.checkpoint_ns), array_agg(x.checkpoint_id), array_agg(x.task_id), array_agg(x.idx),
        array_agg(x.channel), array_agg(x.type), array_agg(x.blob), array_agg(x.task_path)
    FROM unnest($5::text[], $6::text[]) AS k (ns, id)
    JOIN {schema}.checkpoint_writes AS x ON x.checkpoint_ns = k.ns AND x.checkpoint_id = k.id
    WHERE x.thread_id = $1::text
) AS writes;

-- name: page
-- The keys and rows of a list's next checkpoints, newest first; null stands for any. (in_order: see latest.)
SELECT c.thread_id, c.checkpoint_ns, c.checkpoint_id, c.parent_checkpoint_id, c.checkpoint::text, c.metadata::text
FROM {schema}.checkpoints AS c
WHERE ($1::text IS NULL OR c.thread_id = $1::text)
    AND ($2::text IS NULL OR c.checkpoint_ns = $2::text)
    AND ($3::text IS NULL OR c.checkpoint_id = $3::text)
    AND ($4::jsonb IS NULL OR c.metadata @> $4::jsonb)
    AND ($5::text IS NULL OR CASE
        WHEN {in_order} THEN c.checkpoint_id < $5::text
        ELSE c.checkpoint_id COLLATE "C" < $5::text
    END)
    AND ($6::text IS NULL OR CASE
        WHEN {in_order} THEN (c.checkpoint_id, c.thread_id, c.checkpoint_ns) < ($6::text, $7::text, $8::text)
        ELSE (c.checkpoint_id COLLATE "C", c.thread_id, c.checkpoint_ns) < ($6::text, $7::text, $8::text)
    END)
ORDER BY CASE WHEN {in_order} THEN c.checkpoint_id END DESC,
    CASE WHEN NOT {in_order} THEN c.checkpoint_id COLLATE "C" END DESC,
    c.thread_id DESC, c.checkpoint_ns DESC
LIMIT $9::bigint;

-- name: blobs_of
-- The blobs that these checkpoints name.
SELECT named.thread_id, named.ns, named.channel, named.version, found.type, found.blob
FROM (
    SELECT DISTINCT k.thread_id, k.ns, v.key AS channel, v.value AS version
    FROM unnest($1::text[], $2::text[], $3::text[]) AS k (thread_id, ns, id)
    CROSS JOIN LATERAL (
        SELECT n.checkpoint FROM {schema}.checkpoints AS n
        WHERE n.thread_id = k.thread_id AND n.checkpoint_ns = k.ns AND n.checkpoint_id = k.id LIMIT 1
    ) AS c
    CROSS JOIN LATERAL jsonb_each_text(c.checkpoint -> 'channel_versions') AS v
) AS named
CROSS JOIN LATERAL (
    SELECT x.type, x.blob FROM {schema}.checkpoint_blobs AS x
    WHERE x.thread_id = named.thread_id AND x.checkpoint_ns = named.ns AND x.channel = named.channel
        AND x.version = named.version
    LIMIT 1
) AS found;

-- name: writes_of
-- The writes of these checkpoints.
SELECT x.thread_id, x.checkpoint_ns, x.checkpoint_id, x.task_id, x.idx, x.channel, x.type, x.blob, x.task_path
FROM unnest($1::text[], $2::text[], $3::text[]) AS k (thread_id, ns, id)
JOIN {schema}.checkpoint_writes AS x
    ON x.thread_id = k.thread_id AND x.checkpoint_ns = k.ns AND x.checkpoint_id = k.id;

-- name: outlines
-- All checkpoints of a thread, without their values except those that only say that there is a blob.
SELECT c.checkpoint_ns, c.checkpoint_id, c.parent_checkpoint_id,
    jsonb_build_object(
        'v', c.checkpoint -> 'v', 'ts', c.checkpoint -> 'ts', 'channel_versions', c.checkpoint -> 'channel_versions',
        'channel_values', (
            SELECT jsonb_object_agg(x.key, x.value) FROM jsonb_each(c.checkpoint -> 'channel_values') AS x
            WHERE x.value = 'true'::jsonb AND EXISTS (
                SELECT FROM {schema}.checkpoint_blobs AS s
                WHERE s.thread_id = c.thread_id AND s.checkpoint_ns = c.checkpoint_ns AND s.channel = x.key
                    AND s.version = c.checkpoint -> 'channel_versions' ->> x.key
            )
        )
    )::text,
    c.metadata::text,
    (c.checkpoint ->> 'v')::int < 4 AND EXISTS (
        SELECT FROM {schema}.checkpoint_writes AS w
        WHERE w.thread_id = c.thread_id AND w.checkpoint_ns = c.checkpoint_ns
            AND w.checkpoint_id = c.parent_checkpoint_id AND w.channel = '__pregel_tasks'
    )
FROM {schema}.checkpoints AS c WHERE c.thread_id = $1::text;

-- name: now
-- The server's time, in seconds of Unix time.
SELECT extract(epoch FROM clock_timestamp())::float8;

-- name: idle
-- The threads whose last checkpoint is older than this time. Reads the whole table.
SELECT c.thread_id FROM {schema}.checkpoints AS c
GROUP BY c.thread_id HAVING max(c.checkpoint ->> 'ts') < $1::text ORDER BY c.thread_id;

-- name: of_runs
-- The checkpoints that these runs have saved.
SELECT c.thread_id, c.checkpoint_ns, c.checkpoint_id FROM {schema}.checkpoints AS c
WHERE c.metadata ->> 'run_id' = ANY ($1::text[]);
