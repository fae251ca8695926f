"""Added modules, worked out: what `trainable.modules` of a recipe can name."""
