"""Faults that `longtake drill` injects into small runs, and what must happen then."""
