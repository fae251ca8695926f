"""Whether a training goes wrong, and where to go back to: pure functions over numbers."""
