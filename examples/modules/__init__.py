"""Added modules, worked out: what `trainable.module` of a recipe can name."""
