UPDATE {schema}.mailbox_threads SET wake_at = $3::bigint WHERE thread_id = $1::text AND wake_at = $2::bigint
