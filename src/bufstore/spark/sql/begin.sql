-- Takes the name for the query, or says who has it. A batch that is repeated finds itself, and what its rows came to.
INSERT INTO {schema}.spark_sources AS s (app_id, query_id, batch_id) VALUES ($1::text, $2::text, $3::bigint)
ON CONFLICT (app_id) DO UPDATE SET
    batch_id = CASE WHEN s.query_id = excluded.query_id THEN greatest(s.batch_id, excluded.batch_id) ELSE s.batch_id END,
    fingerprint = CASE WHEN s.query_id = excluded.query_id AND s.batch_id < excluded.batch_id THEN NULL ELSE s.fingerprint END
RETURNING query_id, batch_id, fingerprint
