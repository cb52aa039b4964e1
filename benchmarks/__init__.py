"""Measurements of pl_grouprl; `python -m benchmarks` lists them (see README.md)."""
