"""`bufstore doctor`: checks the servers and says what to change."""
