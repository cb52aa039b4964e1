"""Stateful layers, run segment by segment."""
