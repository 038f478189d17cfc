-- name: query_threads
-- A page of threads, those changed last first. The first comparison with the cursor's time finds the place in the
-- index, the second the place among equals.
SELECT (extract(epoch FROM updated_at) * 1000000)::bigint, thread_id,
    version, parent_thread_id, latest_run_id, active_run_id, open_run_id, metadata
FROM {schema}.threads
WHERE ($1::text IS NULL OR resource_id = $1::text)
    AND ($2::text IS NULL OR parent_thread_id = $2::text)
    AND (NOT $3::boolean OR parent_thread_id IS NULL)
    AND ($4::text IS NULL OR thread_id >= $4::text)
    AND ($5::text IS NULL OR thread_id < $5::text)
    AND ($6::bigint IS NULL OR updated_at <= timestamptz 'epoch' + $6::bigint * interval '1 microsecond')
    AND ($6::bigint IS NULL
        OR updated_at < timestamptz 'epoch' + $6::bigint * interval '1 microsecond' OR thread_id > $7::text)
ORDER BY updated_at DESC, thread_id LIMIT $8::int;

-- name: query_runs
-- A page of runs, the oldest first.
SELECT (extract(epoch FROM created_at) * 1000000)::bigint, run_id, record
FROM {schema}.runs
WHERE ($1::text IS NULL OR thread_id = $1::text)
    AND ($2::text IS NULL OR status = $2::text)
    AND ($3::text IS NULL OR run_id >= $3::text)
    AND ($4::text IS NULL OR run_id < $4::text)
    AND ($5::bigint IS NULL
        OR (created_at, run_id) > (timestamptz 'epoch' + $5::bigint * interval '1 microsecond', $6::text))
ORDER BY created_at, run_id LIMIT $7::int;

-- name: messages_oldest_first
-- A page of the messages between two positions, counted from 1.
SELECT seq + 1, payload FROM {schema}.messages
WHERE thread_id = $1::text AND seq BETWEEN $2::int - 1 AND $3::int - 1 ORDER BY seq LIMIT $4::int;

-- name: messages_newest_first
-- The same page from its other end.
SELECT seq + 1, payload FROM {schema}.messages
WHERE thread_id = $1::text AND seq BETWEEN $2::int - 1 AND $3::int - 1 ORDER BY seq DESC LIMIT $4::int;

-- name: messages_by_id
-- The messages that may have an id, found by its hash, which the primary key's index carries. There may be one too
-- many, never one too few.
SELECT seq + 1, payload FROM {schema}.messages WHERE thread_id = $1::text AND id_hash = $2::bigint ORDER BY seq;
