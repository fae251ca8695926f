"""Checkpoints: written aside in the background, renamed when complete, verified when read."""
