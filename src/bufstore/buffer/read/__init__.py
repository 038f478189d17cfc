"""The read path: what the store holds, joined with the thread's tail in the log."""
