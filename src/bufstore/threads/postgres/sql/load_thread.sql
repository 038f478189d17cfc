SELECT version, parent_thread_id, latest_run_id, active_run_id, open_run_id, metadata
FROM {schema}.threads WHERE thread_id = $1::text
