SELECT state FROM {schema}.threads WHERE thread_id = $1::text AND state IS NOT NULL
