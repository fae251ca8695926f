"""Begins a run with the weights of another run, its parent (`train --from`).

The recipes of the two runs may differ.
"""

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from longtake import config, errors
from longtake.checkpoint import store
from longtake.formatting import join_words
from longtake.models.components import assemble, outline
from longtake.models.lora_files import read_lora
from longtake.models.trainable import load_trained, trained_state
from longtake.parallel.fsdp import gradients_of_any_dtype
from longtake.run_dir import Parent, RunDirectory
from longtake.training import session as sessions
from longtake.training.saving import EMA, FLAT, state_parts

_MAX_NAMED = 3
_MAX_DIFFERENCES = 12


# --- Which run --------------------------------------------------------------------------------


def parent_of(run: RunDirectory, wanted: Parent | None) -> Parent | None:
    """Return the parent of a run: the run and step with whose weights it begins.

    An existing run has it in its record; a new run takes `wanted`, which `--from` names (None:
    none).
    """
    return run.record().get("parent") if run.exists() else wanted


def refuse_another_parent(run: RunDirectory, wanted: Parent | None) -> None:
    """Refuse `--from` for an existing run that did not begin with the checkpoint it names.

    Raises:
        errors.RunError: names the weights with which the run began.
    """
    if wanted is None or not run.exists() or (known := run.record().get("parent")) == wanted:
        return
    began = "random or pretrained weights" if known is None else _named(known)
    raise errors.RunError(
        f"{run.path} exists and began with {began}, not with {_named(wanted)}. Leave --from out to "
        "resume it, or begin another run: --fresh, or --set out=FOLDER."
    )


def _named(parent: Parent) -> str:
    without = ", without its optimizer" if parent["weights_only"] else ""
    return f"{parent['path']}@{parent['step']}{without}"


def _checkpoint(parent: Parent) -> Path:
    return RunDirectory(Path(parent["path"])).checkpoint_path(parent["step"])


# --- Whether it fits --------------------------------------------------------------------------


def refuse_wrong_start(recipe: config.Recipe, parent: Parent | None) -> None:
    """Refuse a recipe that cannot train the weights of `--from` or `trainable.init_from`.

    Raises:
        errors.RecipeError: the weights are of another model, or both sources are given.
        errors.CheckpointError: the parent's checkpoint cannot be read.
        ModelError: the LoRA file cannot be read.
    """
    file = recipe.trainable.init_from
    if parent is not None and file is not None:
        raise errors.RecipeError(
            f"--from {_named(parent)} and trainable.init_from {file} both say what the run begins "
            "with. Leave one of them out."
        )
    if file is not None:
        parts = outline(recipe)
        read_lora(file, parts.model, parts.family, recipe.model.expert)
    if parent is not None:
        _refuse_another_model(recipe, parent)


def _refuse_another_model(recipe: config.Recipe, parent: Parent) -> None:
    run = RunDirectory(Path(parent["path"]))
    before, where = run.recipe(), f"--from {_named(parent)}"
    if before.model.family != recipe.model.family:
        raise errors.RecipeError(
            f"{where} is of the family {before.model.family}, and the recipe trains "
            f"{recipe.model.family}. Take a run of the same family."
        )
    if before.model.expert != recipe.model.expert:
        there, here = (
            f'"{each}"' if each else "unset" for each in (before.model.expert, recipe.model.expert)
        )
        raise errors.RecipeError(
            f"{where} has trained with model.expert = {there}, and the recipe says {here}: the two "
            "transformers of a release serve other noise levels. Take a run of the same expert."
        )
    kinds = before.trainable.base(), recipe.trainable.base()
    if kinds[0] != kinds[1]:
        raise errors.RecipeError(
            f"{where} has trained with trainable.kind = {kinds[0]}, and the recipe says "
            f"{kinds[1]}. Write its whole model with `longtake export {run.path} --out FOLDER` and "
            "set model.pretrained to that folder."
        )
    try:
        saved = store.part_shapes(_checkpoint(parent), "model")
    except (errors.CheckpointError, OSError, ValueError) as error:
        raise errors.CheckpointError(f"{where} cannot be read: {error}") from error
    # The vocabulary is read from the parent, as its size is the shape of an embedding; all else is
    # an outline without memory.
    parts = assemble(recipe, (), run.components_path, frozen_parts=False, weights="checkpoint")
    found = _first_difference(saved, _shapes(trained_state(parts.model)))
    if found is not None:
        raise errors.RecipeError(
            f"{where} holds other weights than the recipe trains: {found}. Take the parent's "
            "model.config and trainable keys, or a run that has trained the same weights."
        )


def _shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(value, "shape", ())) for name, value in state.items()}


def _first_difference(
    saved: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]
) -> str | None:
    """Describe the first tensors whose shapes differ from the saved ones; None if all agree."""
    names = sorted(name for name in saved | wanted if saved.get(name) != wanted.get(name))
    if not names:
        return None
    named = [
        f"{name} is {_shape(saved.get(name))} there and {_shape(wanted.get(name))} here"
        for name in names[:_MAX_NAMED]
    ]
    more = f", and {len(names) - _MAX_NAMED} more differ" if len(names) > _MAX_NAMED else ""
    return f"{'; '.join(named)}{more}"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


# --- Taking over ------------------------------------------------------------------------------


def begin_from(
    session: sessions.Session, parent: Parent, state: sessions.TrainingState
) -> list[str]:
    """Load weights, averages and optimizer states of the parent run (`--from`) into a new run.

    Learning rates and other settings are the recipe's. An average that the parent lacks begins with
    the parent's weights. All ranks must call it.

    Returns:
        Warnings about states that were not taken over.
    """
    path, model = _checkpoint(parent), state.components.model
    # Before the averages: one that the parent lacks begins as a copy of these weights.
    weights = trained_state(model)
    store.load_parts(path, {"model": weights}, session.world)
    load_trained(model, weights)
    averages, taken = state.ema.states(), dict[str, dict[str, Any]]()
    for profile, average in averages.items():
        if (path / EMA / profile).is_dir():
            taken[f"{EMA}/{profile}"] = average
        else:
            state.ema.load({**averages, profile: trained_state(model)})
    store.load_parts(path, taken, session.world)
    notes = [] if parent["weights_only"] else _take_optimizer(session, path, state)
    new = [name for name in averages if f"{EMA}/{name}" not in taken]
    if new:
        notes.append(f"{path.parents[1]} has no average {join_words(new)}: begun with its weights")
    # Keys of the recipe that change what is trained.
    changed = config.differences(RunDirectory(Path(parent["path"])).recipe(), session.recipe)
    differences = [f"{key}: {old!r} there, {new!r} here" for key, old, new in changed]
    if session.world.is_first:
        session.run.append_event("begun_from", step=0, parent=parent, differences=differences)
        session.console.print(f"  begins with {_named(parent)}", markup=False, highlight=False)
        for line in differences[:_MAX_DIFFERENCES]:
            session.console.print(f"    {line}", markup=False, highlight=False)
    return notes


def _take_optimizer(
    session: sessions.Session, path: Path, state: sessions.TrainingState
) -> list[str]:
    """Load the parent run's optimizer states if names and shapes agree; else leave them empty."""
    wanted = state_parts(state)["optimizer"]
    found: str | None = "the checkpoint has none"
    if (path / "optimizer").is_dir():
        saved = store.part_shapes(path, "optimizer")
        found = _first_difference(_states_of(saved), _states_of(_shapes(wanted)))
    if found is None:
        # Hyperparameters in the checkpoint are the parent's, and stay out.
        states = {name: value for name, value in wanted.items() if name.startswith("state.")}
        store.load_parts(path, {"optimizer": states}, session.world)
        model = state.components.model
        with gradients_of_any_dtype(model):
            set_optimizer_state_dict(model, state.optimizers, wanted | states, options=FLAT)
    else:
        # `state_parts` has filled in states: torch makes them when it is asked for them.
        for optimizer in state.optimizers:
            optimizer.state.clear()
    return [] if found is None else [f"optimizer states begin anew: {found}"]


def _states_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if name.startswith("state.")}
