INSERT INTO {schema}.buffer_log (epoch) VALUES ($1::int)
ON CONFLICT (only_one) DO UPDATE SET epoch = greatest(buffer_log.epoch, excluded.epoch)
