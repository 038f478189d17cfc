-- One change of lineage at a time in a schema, until the transaction ends.
SELECT pg_advisory_xact_lock(hashtextextended('bufstore lineage ' || $1::text, 0))
