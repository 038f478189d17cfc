"""Writing conversations as agents do, and comparing what Postgres then holds: for `import` and `demo`."""
