"""Groups of entries, each one message of the log: the next form of it (docs/adr/0027). Nothing writes with it yet."""
