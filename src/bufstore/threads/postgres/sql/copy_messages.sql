-- Messages that cannot be there yet, many of them: a third of what the INSERT costs that looks for each (docs/adr/0017).
COPY {schema}.messages (thread_id, seq, payload, id_hash) FROM STDIN (FORMAT binary)
