"""Hands a trained model to diffusers.

The folder is a pipeline of the whole model, whatever of it was trained. LoRA is merged into its
weights, and is also there apart for `load_lora_weights`, in `pytorch_lora_weights.safetensors`. No
pipeline has a place for a module of one's own: its weights are in `added_module.safetensors`, and
the pipeline is the model without it.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from longtake.errors import RunError
from longtake.evaluation.sample import Sampler
from longtake.models.added import added_module
from longtake.models.lora import lora_state
from longtake.models.trainable import plain_copy


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
        parts.family.export(plain_copy(parts.model), parts.codec, parts.text, shift, aside)
        _write_adapters(parts.model, aside)
        if out.exists():
            out.rmdir()
        aside.rename(out)
    except OSError as error:
        raise RunError(
            f"--out {out} cannot be written: {error.strerror or error}. Choose another folder."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_adapters(model: nn.Module, folder: Path) -> None:
    """What was trained beside the model's own weights, in files of its own."""
    lora, module = lora_state(model), added_module(model)
    files = {
        "pytorch_lora_weights": {f"transformer.{name}": value for name, value in lora.items()},
        "added_module": {} if module is None else module.state_dict(),
    }
    for name, weights in files.items():
        if weights:
            save_file(_apart(weights), folder / f"{name}.safetensors", {"format": "pt"})


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors wants them: in one piece each, and sharing no memory."""
    return {name: value.detach().clone().contiguous() for name, value in weights.items()}


def check_out(out: Path) -> None:
    """Refuse a folder that holds something, before weights are loaded for it.

    Raises:
        RunError: it does.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"--out {out} holds something already. Name a new folder.")
