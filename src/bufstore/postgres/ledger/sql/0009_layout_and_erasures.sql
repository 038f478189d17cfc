-- Works with: 0008
-- How the store's threads are distributed over lanes and partitions by their ids: a new log must do the same.
ALTER TABLE {schema}.buffer_log
    ADD COLUMN lanes int,
    ADD COLUMN partitions int;
-- The threads that are erased together with another one. Once they are deleted, nothing else tells whose children they
-- were.
CREATE TABLE {schema}.buffer_erasures (
    erased text COLLATE "C" NOT NULL,
    thread_id text COLLATE "C" NOT NULL,
    PRIMARY KEY (erased, thread_id)
);
