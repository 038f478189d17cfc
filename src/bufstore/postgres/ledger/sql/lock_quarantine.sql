-- Who parks counts, one at a time: two flushers together must not go past the bound. Any row that everybody has.
SELECT epoch FROM {schema}.buffer_log FOR UPDATE
