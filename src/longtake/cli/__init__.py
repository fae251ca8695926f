"""The verbs: parse, call, print."""

from longtake.cli.app import main

__all__ = ["main"]
