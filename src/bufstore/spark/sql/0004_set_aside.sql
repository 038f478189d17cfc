-- Works with: 0001
-- The set-aside rows of batches that may come again. A later attempt leaves them alone, even when they are no longer in
-- quarantine: people decide about them. Only the rows of each app id's latest batch are kept.
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
