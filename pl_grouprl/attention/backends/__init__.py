"""Attention over a packed row: a rule, and four ways to apply it."""
