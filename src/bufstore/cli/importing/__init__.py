"""`bufstore import`: conversations from a file."""
