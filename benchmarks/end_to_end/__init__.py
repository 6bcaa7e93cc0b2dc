"""Whole models, plain and patched, eager and compiled: `python -m benchmarks.end_to_end`."""
