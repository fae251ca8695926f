"""The run of tests/told_run.py."""

from tests.told_run import _told, killed, seen, teller_of, told

__all__ = ["_told", "killed", "seen", "teller_of", "told"]
