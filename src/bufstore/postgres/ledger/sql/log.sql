-- name: server_run
-- Which run of which server this is: a copy that takes over was started at another time. In every session's time zone.
SELECT extract(epoch FROM pg_catalog.pg_postmaster_start_time())::text;

-- name: epoch
-- The generation of the stream that the rows belong to; no row before the first.
SELECT epoch FROM {schema}.buffer_log;

-- name: set_epoch
-- Remember the generation of a stream before it is created. It never goes down.
INSERT INTO {schema}.buffer_log (epoch) VALUES ($1::int)
ON CONFLICT (only_one) DO UPDATE SET epoch = greatest(buffer_log.epoch, excluded.epoch);

-- name: target
-- Where the log is flushed to; no row until that is stored.
SELECT domain, store, target FROM {schema}.buffer_log WHERE target IS NOT NULL;

-- name: claim
-- Store where the log is flushed to, unless it is stored already: processes that start at the same time all get the
-- same answer.
INSERT INTO {schema}.buffer_log AS l (epoch, domain, store, target) VALUES ($1::int, $2::text, $3::text, $4::text)
ON CONFLICT (only_one) DO UPDATE SET
    epoch = greatest(l.epoch, excluded.epoch),
    domain = CASE WHEN l.target IS NULL THEN excluded.domain ELSE l.domain END,
    store = CASE WHEN l.target IS NULL THEN excluded.store ELSE l.store END,
    target = coalesce(l.target, excluded.target)
RETURNING domain, store, target;

-- name: layout
-- How many lanes and partitions the log has; no row until that is stored.
SELECT lanes, partitions FROM {schema}.buffer_log WHERE lanes IS NOT NULL;

-- name: set_layout
-- Store how many lanes and partitions the log has, unless it is stored already.
UPDATE {schema}.buffer_log SET lanes = $1::int, partitions = $2::int WHERE lanes IS NULL;

-- name: made
-- The last log that is known to have existed; no row until one is.
SELECT made, made_stream FROM {schema}.buffer_log WHERE made IS NOT NULL;

-- name: note_made
-- Remember that a log of this generation has existed. It never goes back, and the first stream of a generation stays.
UPDATE {schema}.buffer_log SET made = $1::int, made_stream = $2::text WHERE made IS NULL OR made < $1::int;

-- name: begin_erasure
-- Remember the threads that are erased together with another one. Those that an earlier try has remembered stay.
INSERT INTO {schema}.buffer_erasures (erased, thread_id) SELECT $1::text, unnest($2::text[]) ON CONFLICT DO NOTHING;

-- name: erasing
-- The threads that are erased together with another one.
SELECT thread_id FROM {schema}.buffer_erasures WHERE erased = $1::text ORDER BY thread_id;

-- name: end_erasure
-- Forget threads that have been erased.
DELETE FROM {schema}.buffer_erasures WHERE erased = $1::text AND thread_id = ANY ($2::text[]);

-- name: archived
-- The position up to which an archive has the log.
SELECT position FROM {schema}.buffer_archive;

-- name: set_archived
-- Remember how far an archive has got. It never goes back.
INSERT INTO {schema}.buffer_archive AS a (position) VALUES ($1::bigint)
ON CONFLICT (one) DO UPDATE SET position = greatest(a.position, excluded.position);

-- name: may_be_archived
-- The position up to which an archive may have the log, because a run has ended or begun.
SELECT greatest(position, begun) FROM {schema}.buffer_archive;

-- name: begin_archiving
-- Remember how far a run of an archive is going to get.
INSERT INTO {schema}.buffer_archive AS a (position, begun) VALUES (0, $1::bigint)
ON CONFLICT (one) DO UPDATE SET begun = greatest(a.begun, excluded.begun);
