SELECT * FROM {schema}.checkpoint_v1(
    $1::text, $2::boolean, $3::int, $4::bytea[], $5::bigint[],
    $6::text, $7::bytea, $8::text, $9::text,
    $10::bytea, $11::bytea, $12::bigint
)
