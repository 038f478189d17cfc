SELECT seq FROM {schema}.buffer_quarantine WHERE seq = ANY ($1::bigint[])
