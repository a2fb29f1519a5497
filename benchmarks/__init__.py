"""Measure what a save costs, on every path: `python -m benchmarks list | plan | run | resume | check`."""
