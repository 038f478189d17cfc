-- The first of the queue, claimed: see 0003_claim_at_once.sql.
SELECT * FROM {schema}.mailbox_claim_v1($1::text, $2::bigint, $3::text, $4::bytea, $5::bigint, $6::text)
