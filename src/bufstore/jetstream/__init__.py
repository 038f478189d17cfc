"""JetStream: messages, streams, group commit, and the adapter to nats-py. Below all that talks to NATS."""
