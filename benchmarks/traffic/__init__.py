"""Bytes that a rank sends in a step, beside those of XLA: `python -m benchmarks.traffic`."""
