UPDATE {schema}.buffer_threads SET given_up = greatest(given_up, $2::bigint) WHERE thread_id = $1::text
