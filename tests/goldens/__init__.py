"""Goldens: what an earlier commit computes, compared with what this working tree computes."""
