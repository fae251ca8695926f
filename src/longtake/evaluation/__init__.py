"""Evaluation of checkpoints: samples, measures, held-out losses, servers, and exports."""
