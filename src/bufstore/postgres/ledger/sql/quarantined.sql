SELECT count(*) FROM {schema}.buffer_quarantine
