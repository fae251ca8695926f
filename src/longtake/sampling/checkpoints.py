"""Finds a run's checkpoints, and loads the weights of one into a model."""

from contextlib import suppress
from pathlib import Path

from torch import nn

from longtake.checkpoint import files, store
from longtake.errors import CheckpointError
from longtake.models import lora_files, trainable
from longtake.models.components import Components
from longtake.run_dir import RunDirectory
from longtake.trust import TrustError, is_own


def load_weights(checkpoint: Path, weights: str, model: nn.Module, trained: frozenset[str]) -> None:
    """Load a checkpoint's weights into a model; `trained` are the names of `trained_state`.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or of another model.
    """
    state = {name: value for name, value in model.state_dict().items() if name in trained}
    shapes = expected = {name: tuple(value.shape) for name, value in state.items()}
    with suppress(CheckpointError, OSError, ValueError):  # the loading says what is unreadable
        shapes = store.part_shapes(checkpoint, weights)
    if shapes != expected:
        name = min(each for each in shapes | expected if shapes.get(each) != expected.get(each))
        has, wants = (list(each[name]) if name in each else "none" for each in (shapes, expected))
        raise CheckpointError(
            f"{checkpoint / weights} holds another model than the recipe describes: {name} is "
            f"{has} there and {wants} by the recipe. Is it a checkpoint of another run?"
        )
    store.load_parts(checkpoint, {weights: state})
    trainable.load_trained(model, state)


def load_start(
    run: RunDirectory,
    parts: Components,
    weights: str,
    trained: frozenset[str],
    *,
    trust: bool = False,
) -> None:
    """Give a model that was just built the weights with which its run began.

    Averages began with the same. Random weights and new LoRA follow from the recipe's seed, so that
    the model has them already.

    Raises:
        TrustError: without `trust`, another user's run began with a run that its record names.
        CheckpointError: the run began with a checkpoint of another run, which is gone.
        ModelError: the LoRA file of `trainable.init_from` cannot be read.
    """
    recipe, parent = run.recipe(), run.record().get("parent")
    if parent is not None:
        begun = RunDirectory(Path(parent["path"]))
        if not trust and not is_own(run):  # it may name any folder of this computer
            raise TrustError(
                f"{run.path} was not begun by this user on this host, and says that it began with "
                f"{begun.path}. If that is so on this computer, run the same command with --trust."
            )
        checkpoint = begun.checkpoint_path(parent["step"])
        is_whole = parent["step"] in begun.checkpoint_steps()
        if not is_whole or begun.record()["id"] != parent["id"]:  # another run may be there by now
            raise CheckpointError(
                f"{run.path} began with {checkpoint}, which is not there any more, so its first "
                "weights cannot be sampled. Restore that checkpoint, or name a later step."
            )
        has_them = (checkpoint / weights).is_dir()
        load_weights(checkpoint, weights if has_them else "model", parts.model, trained)
    elif recipe.trainable.init_from is not None:
        stored = lora_files.read_lora(
            recipe.trainable.init_from, parts.model, parts.family, recipe.model.expert
        )
        lora_files.load_lora(stored, parts.model)


def find_run(path: Path) -> RunDirectory:
    """Return the run directory at a path, or the one that contains it as a checkpoint."""
    run = RunDirectory(path)
    # A folder of that name may contain runs itself.
    if path.absolute().parent.name == "checkpoints" and not run.exists():
        return RunDirectory(path.absolute().parents[1])
    return run


def find_checkpoint(
    path: Path, step: int | None = None, part: str = ""
) -> tuple[RunDirectory, Path]:
    """Return the run and the checkpoint at a path; of a run, that of `step` or the newest.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    run = find_run(path)
    if run.path != path:
        if step is not None:
            raise CheckpointError(
                f"{path} is one checkpoint already. Leave --step {step} out, or name the run: "
                f"{run.path}."
            )
        if not path.is_dir():
            raise CheckpointError(
                f"There is no checkpoint {path}. The run has those of the steps: "
                f"{run.checkpoint_steps() or 'none'}."
            )
        return run, path
    run.recipe()  # refuses another folder than a run directory
    steps = run.checkpoint_steps()
    if step is not None and step not in steps:
        known = f"steps {', '.join(map(str, steps))}" if steps else "none"
        raise CheckpointError(
            f"{path} has no whole checkpoint of step {step}. Its checkpoints: {known}."
        )
    checkpoint = run.checkpoint_path(step) if step is not None else files.newest_whole(run, part)
    if checkpoint is None:
        raise CheckpointError(
            f"{path} has no whole checkpoint yet. Train on with {run.resume_command()}, or wait "
            "for checkpoint.every steps or checkpoint.minutes."
        )
    return run, checkpoint
