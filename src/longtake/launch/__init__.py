"""Starts a run's ranks: on this node over torch's elastic agent, on many by Slurm."""
