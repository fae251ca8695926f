"""Sends what a run directory gains to experiment trackers; never imports torch."""
