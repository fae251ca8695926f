"""What a node can be asked about its health: one check per file; torch-free."""
