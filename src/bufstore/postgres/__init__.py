"""What knows Postgres: the pool, the migrations, and the store of threads."""
