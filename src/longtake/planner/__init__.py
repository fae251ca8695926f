"""Predictions of a training step's memory, time and gradient flow before it is run."""
