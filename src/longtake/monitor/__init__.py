"""The watcher of a node: a process that reads heartbeats and diagnoses stalls; torch-free."""
