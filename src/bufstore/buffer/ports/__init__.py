"""What the engine needs from the outside: the log, the shared state and the ledger.

The log is `bufstore.buffer.groups.log`, over a stream that adapters provide (`bufstore.buffer.groups.stream`). They are
`bufstore.nats` and `bufstore.memory`, and `bufstore.postgres.ledger.ledger` for the ledger.
"""
