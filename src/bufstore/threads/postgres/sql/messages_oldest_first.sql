SELECT seq + 1, payload FROM {schema}.messages
WHERE thread_id = $1::text AND seq BETWEEN $2::int - 1 AND $3::int - 1 ORDER BY seq LIMIT $4::int
