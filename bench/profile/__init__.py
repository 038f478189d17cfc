"""Profiles that show where the time goes: `python -m bench.profile`."""
