-- Messages that are new or follow the thread's kept part: few, if any, are there already.
INSERT INTO {schema}.messages AS m (thread_id, seq, payload, id_hash)
SELECT * FROM unnest($1::text[], $2::int[], $3::bytea[], $4::bigint[])
ON CONFLICT (thread_id, seq) DO UPDATE SET payload = excluded.payload, id_hash = excluded.id_hash
WHERE m.payload IS DISTINCT FROM excluded.payload
