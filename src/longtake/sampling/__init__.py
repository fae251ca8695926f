"""Samples videos of checkpoints: presets, sampler, files, and claims on what is sampled."""
