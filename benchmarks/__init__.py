"""Measurements of pl_grouprl; each entry is a script of its own (see README.md)."""
