-- Threads that were deleted, with their runs and messages, whatever of them is written again after this.
WITH gone AS (SELECT unnest($1::text[]) COLLATE "C" AS thread_id),
messages AS (DELETE FROM {schema}.messages AS m USING gone WHERE m.thread_id = gone.thread_id),
runs AS (DELETE FROM {schema}.runs AS r USING gone WHERE r.thread_id = gone.thread_id)
DELETE FROM {schema}.threads AS t USING gone WHERE t.thread_id = gone.thread_id
