-- name: claim
-- Claim the first of the queue: see 0003_claim_at_once.sql.
SELECT * FROM {schema}.mailbox_claim_v1($1::text, $2::bigint, $3::text, $4::bytea, $5::bigint, $6::text);

-- name: write
-- A step: the thread's row if it has still version $2, and the dispatches that move. -1 stands for the new version.
SELECT * FROM {schema}.mailbox_write_v1(
    $1::text, $2::bigint, $3::bigint, $4::text, $5::text, $6::bigint, $7::bigint,
    $8::text[], $9::int[], $10::int[], $11::bigint[], $12::bigint[], $13::bigint[], $14::bytea[], $15::text
);
