"""What kvhost costs and what it brings, measured: `python -m benchmarks --help`."""
