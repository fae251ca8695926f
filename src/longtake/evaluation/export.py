"""Hands a trained model to diffusers."""

import shutil
from pathlib import Path

from longtake.errors import RunError
from longtake.evaluation.sample import Sampler


def export_pipeline(sampler: Sampler, out: Path) -> None:
    """Write a diffusers pipeline folder that `from_pretrained` loads; aside first, then renamed.

    Raises:
        RecipeError: diffusers has no pipeline for the run's family, codec and text encoder.
        RunError: the folder holds something already, or cannot be written.
    """
    check_out(out)
    parts, out = sampler.components, out.resolve()
    aside = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        recipe = sampler.recipe
        shift = sampler.shift(recipe.sampling, recipe.data.buckets[0])
        parts.family.export(parts.model, parts.codec, parts.text, shift, aside)
        if out.exists():
            out.rmdir()
        aside.rename(out)
    except OSError as error:
        raise RunError(
            f"--out {out} cannot be written: {error.strerror or error}. Choose another folder."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_out(out: Path) -> None:
    """Refuse a folder that holds something, before weights are loaded for it.

    Raises:
        RunError: it does.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"--out {out} holds something already. Name a new folder.")
