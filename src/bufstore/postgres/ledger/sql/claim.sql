-- The first one wins: of several that begin at the same time, all get the same.
INSERT INTO {schema}.buffer_log AS l (epoch, domain, store, target) VALUES ($1::int, $2::text, $3::text, $4::text)
ON CONFLICT (only_one) DO UPDATE SET
    epoch = greatest(l.epoch, excluded.epoch),
    domain = CASE WHEN l.target IS NULL THEN excluded.domain ELSE l.domain END,
    store = CASE WHEN l.target IS NULL THEN excluded.store ELSE l.store END,
    target = coalesce(l.target, excluded.target)
RETURNING domain, store, target
