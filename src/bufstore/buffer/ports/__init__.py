"""What the buffer needs of the outside (stream, log, shared state, ledger) and of its domain.

Adapters: `bufstore.nats`, `bufstore.postgres.ledger.ledger`, `bufstore.memory`.
"""
