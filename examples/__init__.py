"""Recipes, scripts and modules to start from."""
