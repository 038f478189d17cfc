SELECT saves FROM {schema}.threads WHERE thread_id = $1::text FOR UPDATE
