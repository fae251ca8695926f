"""Warnings about recipes that train other than meant, and the check of context parallelism."""

import torch

from longtake import config
from longtake.errors import RecipeError
from longtake.flow import timesteps
from longtake.models import trainable
from longtake.models.base import latent_shape
from longtake.models.components import Components
from longtake.models.recipe_checks import trained_shapes
from longtake.models.weight_files import quantized_again

_FEW = 0.01
_LEAST_NOISE = 0.5
"""Sigma up to which the lowest 1 % of the trained sigmas gives no warning. Logit-normal sigmas by
the releases' own shifts have 1 % below 0.2 to 0.47, and serve well.
"""


def review_model(
    parts: Components, recipe: config.Recipe, *, has_parent: bool = False
) -> list[str]:
    """Return warnings about parts of a recipe that train in another way than users expect.

    The model may be on any device. `has_parent`: True if the run starts with the weights of another
    run.
    """
    warnings = []
    settings, section = recipe.sampling, recipe.trainable
    if recipe.model.pretrained is None and section.base() != "full" and not has_parent:
        added = "trainable.modules" if section.base() == "frozen" else f"A {section.kind}"
        warnings.append(
            f"{added} on a model of random weights that stays frozen (model.pretrained is unset): "
            "what it can learn is of no use to a trained model, and it learns nothing where the "
            "model's last layer begins at 0. Name a release in model.pretrained, begin with the "
            'weights of a run (--from), or train all (trainable.kind = "full").'
        )
    file, kind = recipe.model.one_file(), recipe.model.quantize
    if kind != "none" and file is not None and (formats := quantized_again(file, kind)):
        warnings.append(
            f"{file} has weights in {', '.join(formats)}, which layers of model.quantize = "
            f'"{kind}" do not hold as they are: they are dequantised when they are read, and '
            "quantised again, which rounds them twice. Of a file in bf16 they are rounded once."
        )
    steps = settings.num_inference_steps or parts.defaults.num_inference_steps
    rule = parts.shift_rule(settings.shift)
    for flow, bucket in trained_shapes(recipe):
        if parts.sigma_range(flow)[0] > 0 or steps < 2:
            continue  # low sigmas are left out on purpose
        uniform = torch.tensor([_FEW], dtype=torch.float64)
        lowest = parts.sample_sigmas(uniform, flow, bucket).item()
        shift = parts.shift(settings.shift, bucket, steps)
        sigmas = timesteps.build_sigmas(steps, shift, rule.terminal, rule.logit_std)
        sampled = sigmas[-3]  # the last one is 0
        if lowest > max(sampled, _LEAST_NOISE):
            warnings.append(
                f"Of the sigmas trained on clips of {bucket} 99 % lie above {lowest:.3f}, but the "
                f"second last of {steps} sampled steps is at sigma {sampled:.3f}, where hardly "
                f"anything is trained. Lower flow.shift ({flow.shift}) or flow.logit_mean."
            )
            break
    layers = [layer for _, layer in trainable.adapter_layers(parts.model)]
    full = [layer for layer in layers if section.kind == "lokr" and trainable.is_full_lokr(layer)]
    if full and section.alpha not in (None, section.rank):
        warnings.append(
            f"trainable.alpha = {section.alpha:g} has no effect on {len(full)} of {len(layers)} "
            f"layers: with trainable.rank = {section.rank} their LoKr is of two full matrices, "
            "whose scale is 1, as in LyCORIS."
        )
    return warnings


def refuse_sharing(parts: Components, recipe: config.Recipe) -> None:
    """Refuse a recipe whose ranks cannot share the model's tokens (`parallel.context`).

    Raises:
        RecipeError: a clip has too few tokens, an added module reads them, or the family has no
            way to share them.
    """
    size = recipe.parallel.context
    if size == 1:
        return
    asked = f"parallel.context = {size} makes {size} processes share the tokens of each clip, "
    if parts.family.block.share is None:
        why = "its captions are of unlike length in a batch"
        if recipe.model.uses_audio:
            why = f'with model.audio = "{recipe.model.audio}" video and audio attend to each other'
        raise RecipeError(
            f"{asked}which the family {recipe.model.family} cannot: {why}. Set "
            "parallel.context = 1."
        )
    if recipe.trainable.modules:
        raise RecipeError(
            f"{asked}but the modules of trainable.modules ({', '.join(recipe.trainable.modules)}) "
            "get all tokens of a clip. Set parallel.context = 1, or leave them out."
        )
    for bucket in recipe.data.shapes():
        num_tokens = parts.family.block.num_tokens(parts.model, latent_shape(parts.codec, bucket))
        if num_tokens < size:
            raise RecipeError(
                f"{asked}but a clip of {bucket} has only {num_tokens}. Take fewer processes for "
                "it, or longer clips."
            )
