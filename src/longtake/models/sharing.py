"""Which models' tokens ranks can share (`parallel.sequence`)."""

from longtake.config import Recipe
from longtake.errors import RecipeError
from longtake.models.assemble import Components, latent_shape


def refuse_sharing(parts: Components, recipe: Recipe) -> None:
    """Refuse a recipe whose model's tokens its ranks cannot share.

    Raises:
        RecipeError: heads do not divide, a clip has too few tokens, or an added module looks at
            them.
    """
    size = recipe.parallel.sequence
    if size == 1:
        return
    asked = f"parallel.sequence = {size}: so many processes share the tokens of each clip, "
    if (heads := parts.family.num_heads(parts.model)) % size:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if not heads % n)
        raise RecipeError(
            f"{asked}and in attention each has some of the heads, but {size} does not divide the "
            f"model's {heads} heads. Take one of {fits}."
        )
    if recipe.trainable.module is not None:
        raise RecipeError(
            f"{asked}but trainable.module {recipe.trainable.module} looks at all tokens of a clip "
            "after a block. Set parallel.sequence = 1, or leave the module out."
        )
    for bucket in recipe.data.shapes():
        num_tokens = parts.family.num_tokens(parts.model, latent_shape(parts.codec, bucket))
        if num_tokens < size:
            raise RecipeError(
                f"{asked}but a clip of {bucket} has only {num_tokens}. Take fewer processes for "
                "it, or longer clips."
            )
