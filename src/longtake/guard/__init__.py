"""Detects divergence of a training and plans rollbacks: pure functions of statistics."""
