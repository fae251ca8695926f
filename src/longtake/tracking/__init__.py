"""Mirrors a run directory to experiment trackers; never imports torch."""
