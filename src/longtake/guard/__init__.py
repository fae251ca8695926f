"""Detection of a training's divergence, and plans of rollbacks: pure functions of statistics."""
