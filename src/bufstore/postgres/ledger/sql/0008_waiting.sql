-- Works with: 0007
-- Entries that cannot be flushed now, while others of their partition can: the cursor has passed them. There is no
-- foreign key to the thread, because its row may be the one that another session holds. Written and deleted in flush
-- transactions only.
CREATE TABLE {schema}.buffer_waiting (
    thread_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    partition int NOT NULL,
    entry_id bigint,
    messages bytea NOT NULL,
    reason text NOT NULL,
    since timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (thread_id, seq)
);
CREATE INDEX buffer_waiting_partition ON {schema}.buffer_waiting (partition, seq);

-- A release that does not know this table would flush later entries of a thread past those that wait here, so it must
-- not own their partition. This trigger makes the partition's row look to its `take`, the only one of its statements
-- that sets the owner, like one that another session holds. Every later release says that it knows the table.
CREATE FUNCTION {schema}.buffer_knows_waiting() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    IF current_setting('bufstore.knows_waiting', true) IS DISTINCT FROM 'yes'
        AND EXISTS (SELECT FROM {schema}.buffer_waiting AS w WHERE w.partition = OLD.partition) THEN
        RETURN NULL;
    END IF;
    RETURN NEW;
END
$body$;
CREATE TRIGGER buffer_knows_waiting BEFORE UPDATE OF owner ON {schema}.buffer_partitions
FOR EACH ROW EXECUTE FUNCTION {schema}.buffer_knows_waiting();
