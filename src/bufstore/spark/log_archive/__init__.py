"""The log as Parquet: archiving ranges of it, and restoring them into Postgres or into a log."""
