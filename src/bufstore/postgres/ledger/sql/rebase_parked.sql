-- What stays parked behind the last replayed entry now waits on that.
UPDATE {schema}.buffer_quarantine SET base_id = $4::bigint
WHERE thread_id = $1::text AND seq > $2::bigint AND base_id = $3::bigint
