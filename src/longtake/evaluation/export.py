"""Exports a trained model to other tools: diffusers, peft and ComfyUI."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torch import nn

from longtake import errors, fsio
from longtake.config import EXPERT_FOLDERS, Expert, Recipe
from longtake.models.added_module import added_modules
from longtake.models.experts import ExpertPair
from longtake.models.lora_export import (
    ExportDtype,
    comfyui_named,
    in_dtype,
    lora_weights,
    write_peft_folder,
    write_weights,
)
from longtake.models.trainable import plain_copy
from longtake.sampling.sampler import Sampler

_LORA_FILES: Mapping[Expert, str] = {
    "high": "pytorch_lora_weights.safetensors",
    "low": "pytorch_lora_weights_transformer_2.safetensors",
}
"""Names of LoRA files in a diffusers pipeline, by expert (transformer of two). diffusers loads the
second one by `load_lora_weights(..., load_into_transformer_2=True)`."""


def _write_pipeline(sampler: Sampler, folder: Path) -> list[str]:
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
        write_weights(lora, folder / _LORA_FILES[expert])
        if expert == "low":
            remarks.append(
                f"{_LORA_FILES[expert]} is for the low-noise transformer of a release: diffusers "
                f'loads it by load_lora_weights(FOLDER, weight_name="{_LORA_FILES[expert]}", '
                "load_into_transformer_2=True)."
            )
    return remarks


def _write_adapter(sampler: Sampler, folder: Path, dtype: ExportDtype | None) -> list[str]:
    """Write a folder with the LoRA for `peft.PeftModel.from_pretrained`, and return remarks."""
    model = sampler.components.model
    weights, _ = lora_weights(model, sampler.components.family, "peft")
    base = sampler.recipe.model.pretrained
    write_peft_folder(in_dtype(weights, dtype), model, base, folder)
    return _expert_alone(sampler)


def _expert_alone(sampler: Sampler) -> list[str]:
    experts = sampler.components.experts
    if experts is None:
        return []
    return [
        f"It is of the {experts.trained}-noise expert ({EXPERT_FOLDERS[experts.trained]}) alone: "
        f"export the run of the {experts.other}-noise expert, too, or use the release's."
    ]


def _write_comfyui_file(sampler: Sampler, path: Path, dtype: ExportDtype | None) -> list[str]:
    """Write a safetensors file for ComfyUI, and return remarks; `dtype` None keeps the weights'."""
    parts = sampler.components
    lora, metadata = lora_weights(parts.model, parts.family, "comfyui")
    weights = lora
    if not lora:
        whole = plain_copy(parts.model).state_dict()
        weights = comfyui_named(whole, parts.family, is_lora=False)
    write_weights(in_dtype(weights, dtype), path, metadata)
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


Format = Literal["diffusers", "peft", "comfyui"]
"""Formats of an export: a pipeline folder, a folder with LoRA alone, or one file."""

_SUFFIX = ".safetensors"


def export(
    sampler: Sampler, out: Path, wanted: Format, dtype: ExportDtype | None = None
) -> list[str]:
    """Export a trained model for another tool, under a temporary name first.

    `dtype` is that of the weights in the file of `comfyui` or `peft`; None: as they are kept.

    Returns:
        Remarks that a user should know.

    Raises:
        RecipeError: the format cannot hold what the run trained, or does not know its family.
        RunError: something is at `out` already, or it cannot be written.
    """
    check_export(sampler.recipe, out, wanted, dtype)
    place = out.resolve()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if wanted == "comfyui":
            with fsio.atomic_write(place) as aside:
                return _write_comfyui_file(sampler, aside, dtype)
        with fsio.atomic_folder(place) as aside:
            if wanted == "diffusers":
                remarks = _write_pipeline(sampler, aside)
            else:
                remarks = _write_adapter(sampler, aside, dtype)
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


def check_export(
    recipe: Recipe, out: Path, wanted: Format, dtype: ExportDtype | None = None
) -> None:
    """Refuse an export that is known to fail from the recipe and the path alone.

    Raises:
        RecipeError: the format cannot hold what the run trained.
        RunError: something is at `out` already, or its name does not fit.
    """
    if wanted == "comfyui" and out.suffix != _SUFFIX:
        raise errors.RunError(
            f"--out {out}: expected the name of a {_SUFFIX} file, such as mine{_SUFFIX}."
        )
    if wanted == "comfyui" and out.exists():
        raise errors.RunError(f"--out {out} is there already. Name a new file.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise errors.RunError(f"--out {out} holds something already. Name a new folder.")
    if wanted == "diffusers" and dtype is not None:
        raise errors.RecipeError(
            f"--dtype {dtype} is for --format comfyui and peft: the parts of a pipeline keep the "
            "types that they were trained with."
        )
    base = recipe.trainable.base()
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
