"""The log as groups: one JetStream message holds many entries (docs/adr/0027)."""
