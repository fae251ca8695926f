"""Saved state: written aside, renamed when whole, exported for other tools."""
