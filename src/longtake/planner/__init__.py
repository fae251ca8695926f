"""Predicts memory, time and gradient flow of a training step before it is run."""
