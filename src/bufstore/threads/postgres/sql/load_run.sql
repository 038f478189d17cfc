SELECT thread_id, record FROM {schema}.runs WHERE run_id = $1::text
