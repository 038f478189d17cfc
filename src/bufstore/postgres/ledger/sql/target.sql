SELECT domain, store, target FROM {schema}.buffer_log WHERE target IS NOT NULL
