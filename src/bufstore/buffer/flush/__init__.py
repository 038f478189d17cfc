"""The flush path."""
