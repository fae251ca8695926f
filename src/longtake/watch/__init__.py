"""Finds hangs, names their culprit and acts as the recipe says: one process per node; no torch."""
