-- Of a process that stops in the middle the lock is free soon.
SELECT t.saves FROM {schema}.threads AS t, set_config('idle_in_transaction_session_timeout', '10s', true)
WHERE t.thread_id = $1::text FOR UPDATE OF t
