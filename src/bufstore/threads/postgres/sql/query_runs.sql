SELECT (extract(epoch FROM created_at) * 1000000)::bigint, run_id, record
FROM {schema}.runs
WHERE ($1::text IS NULL OR thread_id = $1::text)
    AND ($2::text IS NULL OR status = $2::text)
    AND ($3::text IS NULL OR run_id >= $3::text)
    AND ($4::text IS NULL OR run_id < $4::text)
    AND ($5::bigint IS NULL
        OR (created_at, run_id) > (timestamptz 'epoch' + $5::bigint * interval '1 microsecond', $6::text))
ORDER BY created_at, run_id LIMIT $7::int
