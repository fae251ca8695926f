"""Objectives of one's own, named in `objective.kind`."""
