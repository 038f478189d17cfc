-- The first comparison with the cursor's time finds the place in the index, the second the place among equals.
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
ORDER BY updated_at DESC, thread_id LIMIT $8::int
