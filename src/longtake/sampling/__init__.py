"""Sampling of videos from checkpoints: presets, sampler, files, and claims on results."""
