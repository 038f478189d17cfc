UPDATE {schema}.buffer_threads AS b SET
    flushed_seq = s.flushed_seq,
    applied_id = s.applied_id,
    version = s.version,
    ring = s.ring,
    broken_since = nullif(s.broken_since, 0),
    gone = s.gone <> 0,
    sources = s.sources
FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bytea[], $6::bigint[], $7::int[], $8::bytea[])
    AS s (thread_id, flushed_seq, applied_id, version, ring, broken_since, gone, sources)
WHERE b.thread_id = s.thread_id
