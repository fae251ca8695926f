"""The command line: parses arguments, calls the library, and prints results."""

from longtake.cli.app import main

__all__ = ["main"]
