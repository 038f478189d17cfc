-- Of a thread that is named in quarantine the row stays: a replay must find that the thread has gone on. And of one that
-- a source has written to: the source may write the same again at any time, which must not bring the thread back.
DELETE FROM {schema}.buffer_threads AS b
USING unnest($1::text[], $2::bigint[]) AS s (thread_id, flushed_seq)
WHERE b.thread_id = s.thread_id AND b.gone AND b.flushed_seq = s.flushed_seq AND b.sources = ''
    AND NOT EXISTS (SELECT FROM {schema}.buffer_quarantine AS q WHERE q.thread_id = b.thread_id)
