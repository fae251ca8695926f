"""A LoRA file for another tool at each save of a checkpoint (`checkpoint.export`).

The run's folder `exports` has them, with a record of what was written. Only files that the record
names, and that nobody has changed since, are replaced or deleted.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NotRequired

import torch
from typing_extensions import TypedDict

from longtake import errors, fsio
from longtake.config import Recipe
from longtake.models import file_header, lora_export
from longtake.models.components import Components
from longtake.models.trainable import adapter_config, adapter_layers
from longtake.parallel.fsdp import full
from longtake.run_dir import RunDirectory
from longtake.training.parts import Training

_SUFFIX = ".safetensors"
_RECORD = "exports.json"


class ExportedFile(TypedDict):
    """Size and time of a file as it was written."""

    bytes: fsio.Count
    mtime_ns: int


class Export(TypedDict):
    """An export of one step: its name in the folder, and its files; without them, it was begun."""

    name: fsio.FileName
    step: fsio.Count
    files: NotRequired[dict[fsio.InnerPath, ExportedFile]]


class ExportsRecord(TypedDict):
    """The content of exports.json: the exports that are there, oldest first."""

    exports: list[Export]


def refuse_wrong_export(parts: Components, recipe: Recipe) -> None:
    """Refuse `checkpoint.export` if the tool does not know what the recipe trains.

    Raises:
        RecipeError: ComfyUI has no such model.
    """
    if recipe.checkpoint.export == "comfyui":
        for name, _ in adapter_layers(parts.model):
            parts.family.comfyui_name(f"{name}.lora_A.weight", is_lora=True)


def export_lora(training: Training) -> None:
    """Write the LoRA of this step for another tool, if the recipe wants it; all ranks must call it.

    A failure is recorded as an event, and training continues.
    """
    session, state = training.session, training.state
    recipe, step = session.recipe, state.global_step
    if recipe.checkpoint.export is None:
        return
    parts, average = state.components, recipe.ema.sampled()
    swapped = nullcontext() if average is None else state.ema.in_place_of_weights(average)
    with swapped, torch.no_grad():
        given, metadata = lora_export.lora_weights(
            parts.model, parts.family, recipe.checkpoint.export
        )
        # On all ranks, as sharded weights are gathered; copied before the weights come back.
        weights = {name: full(value).to("cpu", copy=True) for name, value in given.items()}
    if not session.world.is_first:
        return
    wanted = recipe.checkpoint.export
    try:
        metadata |= file_header.describe(recipe, parts.family, session.run, step, wanted)
        weights = lora_export.in_dtype(weights, recipe.checkpoint.export_dtype)
        path = path_of(session.run, recipe, step)
        with _kept_record(path, step, recipe.checkpoint.export_keep) as aside:
            if wanted == "peft":
                config = adapter_config(parts.model, recipe.model.pretrained)
                lora_export.write_peft_folder(weights, config, aside, metadata)
            else:
                lora_export.write_weights(weights, aside, metadata)
    except (OSError, errors.LongtakeError) as error:
        training.recorder.export_failed(step, str(error))


def path_of(run: RunDirectory, recipe: Recipe, step: int) -> Path:
    """Return where the export of a step is: a file, or a folder for peft."""
    suffix = "" if recipe.checkpoint.export == "peft" else _SUFFIX
    return run.exports_path / f"{run.path.resolve().name}-{step:08d}{suffix}"


@contextmanager
def _kept_record(path: Path, step: int, keep: int | None) -> Iterator[Path]:
    """Yield where to write an export; then rename it to its path, and delete the oldest ones.

    The record names the export before anything is written, so that nobody else's file is taken for
    one that an interrupted launch has written.

    Raises:
        RunError: something is at the path that the record does not name, or that was changed.
        OSError: it cannot be written.
    """
    folder, name = path.parent, path.name
    before, others, known = None, list[Export](), None
    with suppress(errors.RecordError):  # of a damaged record nothing is known to be ours
        known = fsio.read_record(folder / _RECORD, ExportsRecord)
    for each in [] if known is None else known["exports"]:
        if each["name"] == name:
            before = each
        else:
            others.append(each)
    if path.exists() and (before is None or not all(_unchanged(folder, before).values())):
        raise errors.RunError(
            f"{path} was not written by this run, or was changed since, and stays as it is. Move "
            "it elsewhere to have exports of this step there."
        )
    folder.mkdir(parents=True, exist_ok=True)
    fsio.write_json(folder / _RECORD, {"exports": [*others, {"name": name, "step": step}]})
    if before is not None and path.is_dir():
        _delete(folder, before)
    with fsio.atomic_write(path) if path.suffix == _SUFFIX else fsio.atomic_folder(path) as aside:
        yield aside
    written = [path] if path.is_file() else sorted(path.iterdir())
    files = {str(each.relative_to(folder)): _describe(each) for each in written}
    exports: list[Export] = [*others, {"name": name, "step": step, "files": files}]
    while keep is not None and len(exports) > keep:
        _delete(folder, exports.pop(0))
    fsio.write_json(folder / _RECORD, {"exports": exports})


def _describe(path: Path) -> ExportedFile:
    found = path.lstat()
    return {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns}


def _unchanged(folder: Path, export: Export) -> dict[Path, bool]:
    """Return the files of an export that are there, and whether each is as it was written.

    One whose writing was interrupted is whole or missing, and may be there without a description.
    """
    if "files" not in export:
        path = folder / export["name"]
        return dict.fromkeys([path] if path.is_file() else path.glob("*"), True)
    files = {folder / name: each for name, each in export["files"].items()}
    return {path: _describe(path) == each for path, each in files.items() if path.exists()}


def _delete(folder: Path, export: Export) -> None:
    """Delete the files of an export that nobody has changed, and its folder if it is empty then."""
    for path, is_unchanged in _unchanged(folder, export).items():
        if is_unchanged:
            path.unlink()
    with suppress(OSError):
        (folder / export["name"]).rmdir()
