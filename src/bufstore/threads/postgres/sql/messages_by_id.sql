-- By the hash of the id, which the primary key's index carries: maybe one too many, never one too few.
SELECT seq + 1, payload FROM {schema}.messages WHERE thread_id = $1::text AND id_hash = $2::bigint ORDER BY seq
