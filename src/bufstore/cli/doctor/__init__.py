"""`bufstore doctor`: looks at the servers and says what to mend."""
