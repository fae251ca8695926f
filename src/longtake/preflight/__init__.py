"""Whether the nodes are fit for a run, before it begins."""
