"""Optimizers, fp32 master weights and averages of the weights."""
