"""Faults that `longtake drill` injects into small runs, and checks of the outcomes."""
