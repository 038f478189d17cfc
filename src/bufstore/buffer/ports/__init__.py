"""What the buffer needs of the outside (stream, log, hot state, ledger) and of its domain.

Adapters: `bufstore.nats`, `bufstore.postgres.ledger.ledger`, `bufstore.memory`.
"""
