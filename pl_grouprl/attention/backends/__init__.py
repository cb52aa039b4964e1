"""Attention over a packed row: the rule of a layer, and backends that compute it."""
