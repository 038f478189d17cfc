SELECT thread_id FROM {schema}.threads WHERE parent_thread_id = $1::text ORDER BY thread_id
