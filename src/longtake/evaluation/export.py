"""Exports a trained model to other tools: diffusers, peft and ComfyUI."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from longtake import errors, fsio
from longtake.config import EXPERT_FOLDERS, Expert, Recipe
from longtake.models.added_module import added_modules
from longtake.models.experts import ExpertPair
from longtake.models.file_header import Words, describe
from longtake.models.lora_export import (
    ExportDtype,
    comfyui_named,
    in_dtype,
    lora_weights,
    write_peft_folder,
    write_weights,
)
from longtake.models.trainable import adapter_config, plain_copy
from longtake.sampling.sampler import Sampler

Format = Literal["diffusers", "peft", "comfyui"]
"""Formats of an export: a pipeline folder, a folder with LoRA alone, or one file."""
_SUFFIX = ".safetensors"


class ExportChoice(NamedTuple):
    """What is exported, and how."""

    wanted: Format
    dtype: ExportDtype | None = None
    """Data type of the weights in the file of `comfyui` or `peft`; None: as they are kept."""
    words: Words = Words()
    """Texts for the header of the file with LoRA or the whole model."""


_LORA_FILES: Mapping[Expert, str] = {
    "high": "pytorch_lora_weights.safetensors",
    "low": "pytorch_lora_weights_transformer_2.safetensors",
}
"""Names of LoRA files in a diffusers pipeline, by expert (transformer of two). diffusers loads the
second one by `load_lora_weights(..., load_into_transformer_2=True)`."""


def _header(sampler: Sampler, choice: ExportChoice) -> dict[str, str]:
    facts = sampler.recipe, sampler.components.family, sampler.run, sampler.step
    return describe(*facts, choice.wanted, choice.words)


def _write_pipeline(sampler: Sampler, folder: Path, choice: ExportChoice) -> list[str]:
    """Write a pipeline folder that diffusers' `from_pretrained` loads, and return remarks on it."""
    parts, recipe = sampler.components, sampler.recipe
    rule = parts.shift_rule(recipe.sampling.shift)
    at_bucket = sampler.shift(recipe.sampling, recipe.data.buckets[0])
    models: dict[Expert, nn.Module] = {"high": parts.model}
    # The copy has LoRA merged and no added modules; the sampler's model is unchanged.
    model = plain_copy(parts.model)
    if parts.experts is not None:
        assert parts.other is not None
        models = {parts.experts.trained: parts.model, parts.experts.other: parts.other.model}
        model = ExpertPair(parts.experts.trained, model, plain_copy(parts.other.model))
    parts.family.export(recipe.model, model, parts.codec, parts.text, rule, at_bucket, folder)
    remarks = []
    for expert, each in models.items():
        lora, _ = lora_weights(each, parts.family, "diffusers")
        # diffusers' pipelines cannot read LoKr, so it is only merged into the model.
        if not lora or any(".lokr_" in name for name in lora):
            continue
        # What another run has trained has other facts.
        metadata = _header(sampler, choice) if each is parts.model else {}
        write_weights(lora, folder / _LORA_FILES[expert], metadata)
        if expert == "low":
            remarks.append(
                f"{_LORA_FILES[expert]} is for the low-noise transformer of a release: diffusers "
                f'loads it by load_lora_weights(FOLDER, weight_name="{_LORA_FILES[expert]}", '
                "load_into_transformer_2=True)."
            )
    return remarks


def _write_adapter(sampler: Sampler, folder: Path, choice: ExportChoice) -> list[str]:
    """Write a folder with the LoRA for `peft.PeftModel.from_pretrained`, and return remarks."""
    model = sampler.components.model
    weights, _ = lora_weights(model, sampler.components.family, "peft")
    config = adapter_config(model, sampler.recipe.model.pretrained)
    converted = in_dtype(weights, choice.dtype)
    write_peft_folder(converted, config, folder, _header(sampler, choice))
    return _expert_alone(sampler)


def _expert_alone(sampler: Sampler) -> list[str]:
    experts = sampler.components.experts
    if experts is None:
        return []
    return [
        f"It is of the {experts.trained}-noise expert ({EXPERT_FOLDERS[experts.trained]}) alone: "
        f"export the run of the {experts.other}-noise expert, too, or use the release's."
    ]


def _write_comfyui_file(sampler: Sampler, path: Path, choice: ExportChoice) -> list[str]:
    """Write a safetensors file for ComfyUI, and return remarks."""
    parts = sampler.components
    lora, metadata = lora_weights(parts.model, parts.family, "comfyui")
    weights = lora
    if not lora:
        whole = plain_copy(parts.model).state_dict()
        weights = comfyui_named(whole, parts.family, is_lora=False)
    write_weights(in_dtype(weights, choice.dtype), path, metadata | _header(sampler, choice))
    remarks = ["ComfyUI looks for it in models/loras."]
    if not lora:
        rest = "codec and text encoder are not in it."
        remarks = [f"ComfyUI looks for it in models/diffusion_models; {rest}"]
    if modules := added_modules(parts.model):
        remarks.append(
            f"The added modules ({', '.join(modules)}) are not in it, as ComfyUI has no place for "
            "them, though the rest was trained to go with them. --format diffusers writes them, "
            "too."
        )
    return [*remarks, *_expert_alone(sampler)]


def export(
    sampler: Sampler, out: Path, wanted: Format, dtype: ExportDtype | None = None, **more: Any
) -> list[str]:
    """Export a trained model for another tool, under a temporary name first.

    Args:
        sampler: the run's model, with the weights of a checkpoint.
        out: file or folder to write.
        wanted: format of the export.
        dtype: data type of the weights.
        more: further fields of `ExportChoice`.

    Returns:
        Remarks that a user should know.

    Raises:
        RecipeError: the format cannot hold what the run trained, or does not know its family.
        RunError: something is at `out` already, or it cannot be written.
    """
    choice = ExportChoice(wanted, dtype, **more)
    check_export(sampler.recipe, out, choice)
    place = out.resolve()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with (
            fsio.atomic_write(place)
            if choice.wanted == "comfyui"
            else fsio.atomic_folder(place) as aside
        ):
            if choice.wanted == "comfyui":
                return _write_comfyui_file(sampler, aside, choice)
            write = _write_pipeline if choice.wanted == "diffusers" else _write_adapter
            remarks = write(sampler, aside, choice)
            # With the modules' own parameter names: other tools have no place for them.
            for name, module in added_modules(sampler.components.model).items():
                # Cloned, since safetensors refuses tensors that share memory.
                weights = {each: value.clone() for each, value in module.state_dict().items()}
                (aside / "added_modules").mkdir(exist_ok=True)
                write_weights(weights, aside / "added_modules" / f"{name}.safetensors")
            return remarks
    except OSError as error:
        raise errors.RunError(
            f"--out {place} cannot be written: {error.strerror or error}. Choose another place."
        ) from error


def check_export(recipe: Recipe, out: Path, choice: ExportChoice) -> None:
    """Refuse an export that is known to fail from the recipe and the path alone.

    Raises:
        RecipeError: the format cannot hold what the run trained.
        RunError: something is at `out` already, or its name does not fit.
    """
    wanted, dtype, _ = choice
    if wanted == "comfyui":
        if out.suffix != _SUFFIX:
            raise errors.RunError(
                f"--out {out}: expected the name of a {_SUFFIX} file, such as mine{_SUFFIX}."
            )
        if out.exists():
            raise errors.RunError(f"--out {out} is there already. Name a new file.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise errors.RunError(f"--out {out} holds something already. Name a new folder.")
    base = recipe.trainable.base()
    if choice.words != Words() and wanted == "diffusers" and base != "lora":
        raise errors.RecipeError(
            "--title, --author and --license stand in the header of one file with LoRA or a whole "
            "model, and a pipeline of a whole model has none. Leave them out."
        )
    if wanted == "diffusers" and dtype is not None:
        raise errors.RecipeError(
            f"--dtype {dtype} is for --format comfyui and peft: the parts of a pipeline keep the "
            "types that they were trained with."
        )
    if wanted == "peft" and base != "lora":
        raise errors.RecipeError(
            f"--format peft holds LoRA alone, and this run trained none: trainable.kind is {base}. "
            "Leave --format out to export the whole model."
        )
    if wanted == "comfyui" and base == "frozen":
        raise errors.RecipeError(
            f"This run trained added modules ({', '.join(recipe.trainable.modules)}) alone, and "
            "ComfyUI has no place for them. --format diffusers writes their weights beside those "
            "of the base model."
        )
