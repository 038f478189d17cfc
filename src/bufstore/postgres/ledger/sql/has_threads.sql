SELECT count(*) = 2 FROM pg_tables WHERE schemaname = $1::text AND tablename IN ('threads', 'messages')
