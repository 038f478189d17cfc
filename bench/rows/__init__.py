"""A file for each row of the table, or for a few. Nothing is imported here: a worker loads only what it needs."""
