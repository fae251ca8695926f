"""The watcher of a node: a process of its own that reads heartbeats; torch-free."""
