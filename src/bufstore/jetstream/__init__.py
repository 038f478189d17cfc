"""JetStream: messages, streams, group commit, and the adapter to nats-py. All that talks to NATS builds on it."""
