-- Messages beyond the new end of their thread.
DELETE FROM {schema}.messages AS m
USING unnest($1::text[], $2::int[]) AS s (thread_id, version)
WHERE m.thread_id = s.thread_id AND m.seq >= s.version
