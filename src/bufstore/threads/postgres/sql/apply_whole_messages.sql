-- Messages of whole lists: many are there already, and only those that differ are written.
-- (ON CONFLICT … WHERE alone would lock, and so rewrite, every row. OFFSET 0: see apply_cut.)
INSERT INTO {schema}.messages (thread_id, seq, payload, id_hash)
SELECT s.*
FROM unnest($1::text[], $2::int[], $3::bytea[], $4::bigint[]) AS s (thread_id, seq, payload, id_hash)
LEFT JOIN LATERAL (
    SELECT m.payload FROM {schema}.messages AS m WHERE m.thread_id = s.thread_id AND m.seq = s.seq OFFSET 0
) AS there ON true
WHERE there.payload IS DISTINCT FROM s.payload
ON CONFLICT (thread_id, seq) DO UPDATE SET payload = excluded.payload, id_hash = excluded.id_hash
