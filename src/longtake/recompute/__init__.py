"""Activation memory, before and during the run: what it takes, what fits, what trains."""
