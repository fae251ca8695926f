"""Saved state: written aside in the background, renamed when whole, verified before it is used."""
