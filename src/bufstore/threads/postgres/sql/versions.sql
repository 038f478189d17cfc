SELECT thread_id, version FROM {schema}.threads WHERE thread_id = ANY ($1::text[])
