"""The mathematics of flow matching, pure: no files, no ranks, no models."""
