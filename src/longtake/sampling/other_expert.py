"""The transformer that a run does not train, of a release with two, for sampling and export.

One transformer is for high noise, one for low. The other one is loaded from the release, or from a
checkpoint of another run that has trained it. Or one makes guidance's second pass, without text: it
is the release's, and an export copies its files.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longtake.config import EvaluationSection, Recipe
from longtake.errors import RecipeError
from longtake.models import numerics, streamed
from longtake.models.base import latent_shape
from longtake.models.components import Components, assemble, with_exact_weights
from longtake.models.experts import OtherExpert
from longtake.models.frozen_adapter import attach_sampling_adapter
from longtake.models.trainable import trained_state
from longtake.sampling.checkpoints import find_checkpoint, find_run, load_weights
from longtake.sampling.presets import weights_to_sample
from longtake.trust import refuse_foreign_code


def load_other(
    recipe: Recipe,
    parts: Components,
    device: torch.device,
    run: Path | None = None,
    *,
    trust: bool = False,
    exact: bool = False,
) -> Components:
    """Return a run's components with the release's transformer that the run does not train.

    On a GPU its weights stay in host memory and are copied block by block, so that they need hardly
    any memory beside the trained transformer's.

    Args:
        recipe: recipe of the run; `refuse_wrong_other` has accepted it with the other run.
        parts: components of a release with two transformers.
        device: device to sample on.
        run: another run, or one checkpoint of it; None: `sampling.other_expert`, or the release.
            Its averaged weights are used, if it keeps any.
        trust: run code that it names, even if another user began it.
        exact: build its quantised layers in full precision and without `sampling.adapter`, to
            export it.

    Raises:
        RunError: there is no such run, or it names code and another user began it.
        RecipeError: `run` has trained another boundary between the transformers.
        CheckpointError: `run` has no whole checkpoint.
        ModelError: the release's weights cannot be loaded.
    """
    run = recipe.sampling.other_expert if run is None else run
    dtype = (recipe if run is None else find_run(run).recipe()).model.dtype
    if run is None:
        model = build_other(recipe, parts)
    else:
        model = _model_of_run(run, parts, trust=trust, exact=exact)
    model.eval().requires_grad_(False)
    if not exact:
        _attach_adapter(recipe, parts, model, torch.device("cpu"))
    blocks = parts.family.blocks(model)
    streams = streamed.StreamedBlocks(blocks, device) if device.type != "cpu" else None
    other = OtherExpert(model, dtype, streams)
    # Frees the buffers that StreamedBlocks has just allocated: until the model's turn, the text
    # encoder and the codec need the room.
    other.bring(torch.device("cpu"))
    return replace(parts, other=other)


def build_other(recipe: Recipe, parts: Components, *, weights: bool = True) -> nn.Module:
    """Build the release's transformer that the recipe does not train, frozen and on the CPU.

    Without `weights` it is on the meta device.
    """
    assert parts.has_other
    change: dict[str, Any] = {"subfolder": parts.unconditional}
    if parts.experts is not None:
        change = {"expert": parts.experts.other}
    section = recipe.model.without_file().model_copy(update=change)
    patch = parts.family.patch(section)
    shapes = [latent_shape(parts.codec, bucket, patch) for bucket in recipe.data.shapes()]
    model = parts.family.build(section, shapes, parts.text, weights=weights)
    numerics.keep_weights_in(model, numerics.DTYPES[section.dtype])
    return model.eval().requires_grad_(False)


def other_bytes(recipe: Recipe, parts: Components, target: str) -> int:
    """Return the bytes that the untrained transformer takes on a device.

    On a GPU its blocks are streamed from host memory.
    """
    if not parts.has_other:
        return 0
    model = build_other(recipe, parts, weights=False)
    _attach_adapter(recipe, parts, model, torch.device("meta"))
    blocks = parts.family.blocks(model) if target == "cuda" else []
    return streamed.least_bytes(model, blocks)


def _attach_adapter(
    recipe: Recipe, parts: Components, model: nn.Module, device: torch.device
) -> None:
    if parts.experts is not None:  # a pass without text has none
        other = parts.experts.other
        attach_sampling_adapter(recipe.sampling, model, parts.family, other, device)


def role_of_other(parts: Components) -> str:
    """Say what the untrained transformer does in sampling."""
    if parts.experts is not None:
        return f"the {parts.experts.other}-noise expert serves its sigmas"
    return f"guidance's second pass is by {parts.unconditional}"


def refuse_wrong_other(recipe: Recipe, run: Path | None = None) -> None:
    """Refuse another run as the source of the transformer that this recipe lacks.

    Raises:
        RunError: there is no such run.
        RecipeError: `run` has trained another transformer, or modules of its own.
    """
    path = recipe.sampling.other_expert if run is None else run
    if path is None:
        return
    if recipe.model.expert is None:
        raise RecipeError(
            f"The other expert {path} cannot be used: this run's model.expert is unset, so its "
            "release has one transformer. Leave sampling.other_expert (--other-expert) out."
        )
    own, wanted = find_run(path).recipe(), "low" if recipe.model.expert == "high" else "high"
    if own.model.expert != wanted:
        has = "no expert" if own.model.expert is None else f'"{own.model.expert}"'
        raise RecipeError(
            f"The other expert {path} has trained {has} (model.expert), and this run trains "
            f'"{recipe.model.expert}": name a run with model.expert = "{wanted}", or leave it out '
            "to take the release's."
        )
    if own.model.family != recipe.model.family:
        raise RecipeError(
            f"The other expert {path} is of the family {own.model.family}, and this run of "
            f"{recipe.model.family}. Name a run of the same release."
        )
    if own.trainable.modules:
        raise RecipeError(
            f"The other expert {path} has modules of its own ({', '.join(own.trainable.modules)}), "
            "which take part in its own run's sampling alone. Name a run without "
            "trainable.modules."
        )


def _model_of_run(path: Path, parts: Components, *, trust: bool, exact: bool) -> nn.Module:
    own = find_run(path).recipe()
    weights = weights_to_sample(own)
    run, checkpoint = find_checkpoint(path, None, weights)
    # Without presets: the measures that they name are not imported here, and need no trust.
    model_recipe = own.model_copy(update={"evaluation": EvaluationSection()})
    refuse_foreign_code(run, trust=trust, recipe=model_recipe)
    # Without frozen parts, since codec and text encoder are this run's.
    built = assemble(
        with_exact_weights(own) if exact else own, (), run.components_path, frozen_parts=False
    )
    assert built.experts is not None
    assert parts.experts is not None
    # Each transformer serves the sigmas on its side of the boundary.
    boundaries = built.experts.boundary, parts.experts.boundary
    if boundaries[0] != boundaries[1]:
        raise RecipeError(
            f"The other expert {path} was trained with boundary_ratio {boundaries[0]:g}, and this "
            f"run with {boundaries[1]:g}. Take a run of the same release."
        )
    load_weights(checkpoint, weights, built.model, frozenset(trained_state(built.model)))
    return built.model
