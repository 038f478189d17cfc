SELECT count(*) = 1 FROM pg_tables WHERE schemaname = $1::text AND tablename = 'spark_quarantine'
