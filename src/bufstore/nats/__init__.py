"""The adapters to NATS JetStream: the only modules that import nats."""
