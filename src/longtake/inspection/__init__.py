"""Looks at a run afterwards, or while it trains: reads its directory, and nothing else."""
