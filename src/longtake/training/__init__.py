"""Training of a run: its loop, the parts of a step, state, guard and records."""
