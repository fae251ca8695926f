"""What a model can be exported as, and what is refused before weights are loaded for it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from longtake.config import Recipe
from longtake.errors import RecipeError, RunError
from longtake.evaluation.export.adapter import write_adapter
from longtake.evaluation.export.comfyui import write_comfyui_file
from longtake.evaluation.export.pipeline import write_pipeline
from longtake.evaluation.export.weights import save_added_module
from longtake.evaluation.sampling.studio import Sampler
from longtake.fsio import atomic_write
from longtake.models.added import added_module

Format = Literal["diffusers", "peft", "comfyui"]
"""A pipeline folder, a folder with LoRA alone, or one file."""

_SUFFIX = ".safetensors"


def export(sampler: Sampler, out: Path, wanted: Format) -> list[str]:
    """Write a model; aside first, then renamed.

    Returns:
        What a person should know of it.

    Raises:
        RecipeError: the format cannot hold what the run trained, or does not know its family.
        RunError: something is at `out` already, or it cannot be written.
    """
    check_export(sampler.recipe, out, wanted)
    with _written_whole(out.resolve(), is_file=wanted == "comfyui") as aside:
        if wanted == "comfyui":
            return [write_comfyui_file(sampler, aside), *_left_out(sampler)]
        (write_pipeline if wanted == "diffusers" else write_adapter)(sampler, aside)
        save_added_module(sampler.components.model, aside)
        return []


def check_export(recipe: Recipe, out: Path, wanted: Format) -> None:
    """Refuse what can be known to fail from the recipe and the place alone.

    Raises:
        RecipeError: the format cannot hold what the run trained.
        RunError: something is at `out` already, or its name does not fit.
    """
    _check_out(out, wanted)
    base = recipe.trainable.base()
    if wanted == "peft" and base != "lora":
        raise RecipeError(
            f"--format peft holds LoRA alone, and this run trained none: trainable.kind is {base}. "
            "Leave --format out to export the whole model."
        )
    if wanted == "comfyui" and base == "frozen":
        raise RecipeError(
            f"This run trained the module {recipe.trainable.module} alone, and ComfyUI has no "
            "place for one. --format diffusers writes its weights beside those of its base model."
        )


def _check_out(out: Path, wanted: Format) -> None:
    if wanted == "comfyui":
        if out.suffix != _SUFFIX:
            raise RunError(
                f"--out {out}: expected the name of a {_SUFFIX} file, such as mine{_SUFFIX}."
            )
        if out.exists():
            raise RunError(f"--out {out} is there already. Name a new file.")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"--out {out} holds something already. Name a new folder.")


@contextmanager
def _written_whole(out: Path, *, is_file: bool) -> Iterator[Path]:
    """Where to write; it becomes `out` when the block ends well, and is gone if it does not."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(out) if is_file else _folder_written_aside(out) as aside:
            yield aside
    except OSError as error:
        raise RunError(
            f"--out {out} cannot be written: {error.strerror or error}. Choose another place."
        ) from error


@contextmanager
def _folder_written_aside(out: Path) -> Iterator[Path]:
    aside = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        yield aside
        if out.exists():
            out.rmdir()
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _left_out(sampler: Sampler) -> list[str]:
    if added_module(sampler.components.model) is None:
        return []
    return [
        f"The added module {sampler.recipe.trainable.module} is not in it, as ComfyUI has no place "
        "for one, though the rest was trained to go with it. --format diffusers writes it, too."
    ]
