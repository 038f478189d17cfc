DELETE FROM {schema}.spark_quarantine WHERE thread_id = ANY ($1::text[]) RETURNING rank
