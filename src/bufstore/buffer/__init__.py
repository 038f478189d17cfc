"""The buffer: moves entries from the log into a store. It knows thread ids and bytes, never what the bytes mean."""
