"""The mathematics of flow matching, without files, ranks and models."""
