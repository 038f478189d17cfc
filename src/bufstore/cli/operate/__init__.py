"""Looking after a deployment: a file for each command."""
