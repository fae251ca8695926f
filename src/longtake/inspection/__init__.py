"""Inspection of runs, while they train or afterwards, by reading their directories only."""
