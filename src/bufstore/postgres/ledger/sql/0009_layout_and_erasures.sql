-- Works with: 0008
-- How the store's threads are shared out among lanes, by their ids: a log that is begun anew must do the same.
ALTER TABLE {schema}.buffer_log
    ADD COLUMN lanes int,
    ADD COLUMN partitions int;
-- The threads that go with one that is being erased. Once they are deleted, nothing else tells whose children they were.
CREATE TABLE {schema}.buffer_erasures (
    erased text COLLATE "C" NOT NULL,
    thread_id text COLLATE "C" NOT NULL,
    PRIMARY KEY (erased, thread_id)
);
