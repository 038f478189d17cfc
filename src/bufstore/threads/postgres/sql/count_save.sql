UPDATE {schema}.threads SET saves = $2::bigint, last_id = $3::bigint WHERE thread_id = $1::text
