-- Messages of whole lists: many are there already, and only those that differ are written.
-- (ON CONFLICT … WHERE alone would lock, and so rewrite, every row.)
INSERT INTO {schema}.messages (thread_id, seq, payload, id_hash)
SELECT s.*
FROM unnest($1::text[], $2::int[], $3::bytea[], $4::bigint[]) AS s (thread_id, seq, payload, id_hash)
LEFT JOIN {schema}.messages AS m ON m.thread_id = s.thread_id AND m.seq = s.seq
WHERE m.payload IS DISTINCT FROM s.payload
ON CONFLICT (thread_id, seq) DO UPDATE SET payload = excluded.payload, id_hash = excluded.id_hash
