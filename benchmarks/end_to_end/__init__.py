"""Whole models in four columns, eager and compiled: `python -m benchmarks.end_to_end`."""
