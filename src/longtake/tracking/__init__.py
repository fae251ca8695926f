"""Mirrors of a run's metrics, events and evaluations in experiment trackers; torch-free."""
