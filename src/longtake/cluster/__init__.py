"""Which processes run on which nodes: checks the nodes (preflight), starts the ranks (launch)."""
