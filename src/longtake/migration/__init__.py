"""Reads configurations of other trainers and writes a recipe of them; begin with migrate.py."""
