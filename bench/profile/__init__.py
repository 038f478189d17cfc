"""Where the time goes: `python -m bench.profile`."""
