UPDATE {schema}.mailbox_sweep SET swept_at = clock_timestamp()
WHERE swept_at < clock_timestamp() - make_interval(secs => $1::float8) RETURNING 1
