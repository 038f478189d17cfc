INSERT INTO {schema}.buffer_archive AS a (position) VALUES ($1::bigint)
ON CONFLICT (one) DO UPDATE SET position = greatest(a.position, excluded.position)
