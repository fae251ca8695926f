"""Videos of several checkpoints, or runs, side by side."""
