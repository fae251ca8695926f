"""Runs on several nodes: checks of the nodes (preflight), and start of the ranks (launch)."""
