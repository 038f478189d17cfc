SELECT epoch FROM {schema}.buffer_log
