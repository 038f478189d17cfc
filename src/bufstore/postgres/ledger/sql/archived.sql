SELECT position FROM {schema}.buffer_archive
