"""Faults that one can inject into one's own installation, and what must happen."""
