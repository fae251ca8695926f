"""Everything that knows there is more than one rank."""
