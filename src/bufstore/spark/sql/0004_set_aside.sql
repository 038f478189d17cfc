-- Works with: 0001
-- Rows that were set aside of batches that may come again: a try behind that leaves them to whoever replays or discards
-- them, also when they are no longer in quarantine. Of each app id, those of the batch that came last.
CREATE TABLE {schema}.spark_set_aside (
    app_id   text COLLATE "C" NOT NULL,
    batch_id bigint NOT NULL,
    -- spark_quarantine.key
    key      bytea NOT NULL,
    PRIMARY KEY (app_id, batch_id, key)
);
INSERT INTO {schema}.spark_set_aside (app_id, batch_id, key)
SELECT q.app_id, q.batch_id, q.key
FROM {schema}.spark_quarantine AS q JOIN {schema}.spark_sources AS s USING (app_id, batch_id);
