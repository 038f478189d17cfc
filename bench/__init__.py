"""The benchmarks: ours and what people would use instead, side by side. `python -m bench --help`; see README.md."""
