"""Distributed runs: strategies, the weight stream to samplers, and lost ranks."""
