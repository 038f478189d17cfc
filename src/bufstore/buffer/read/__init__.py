"""The read path: what the store holds, joined with the tail in the log."""
