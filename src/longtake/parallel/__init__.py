"""Everything that depends on the number of ranks."""
