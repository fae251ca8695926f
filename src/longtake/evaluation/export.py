"""Exports a trained model to other tools: diffusers, peft and ComfyUI."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from longtake import errors, fsio
from longtake.config import EXPERT_FOLDERS, Expert, Recipe
from longtake.formatting import plural
from longtake.models.added_module import added_modules
from longtake.models.base import Family
from longtake.models.experts import ExpertPair
from longtake.models.file_header import Words, describe
from longtake.models.lora_export import (
    ExportDtype,
    in_dtype,
    lora_named,
    lora_weights,
    write_peft_folder,
    write_weights,
)
from longtake.models.lora_extraction import extract_lora
from longtake.models.trainable import adapter_config, plain_copy
from longtake.models.whole_export import comfyui_layout, in_scaled_fp8
from longtake.sampling.sampler import Sampler

Format = Literal["diffusers", "peft", "comfyui"]
"""Formats of an export: a pipeline folder, a folder with LoRA alone, or one file."""
Dtype = ExportDtype | Literal["fp8_scaled"]
_SUFFIX = ".safetensors"


class ExportChoice(NamedTuple):
    """What is exported, and how."""

    wanted: Format
    dtype: Dtype | None = None
    """Data type of the weights in the file of `comfyui` or `peft`; None: as they are kept."""
    words: Words = Words()
    """Texts for the header of the file with LoRA or the whole model."""
    extract: int | None = None
    """Rank of the LoRA to extract from a model whose weights were all trained, into one file for
    `diffusers`, too."""
    like: Path | None = None
    """File whose layout a whole model gets for `comfyui`; None: `model.pretrained`, if that is one
    file."""
    is_pushed: bool = False
    """True if the export is sent with a model card, which has `words`, too."""

    @property
    def is_file(self) -> bool:
        return self.wanted == "comfyui" or (self.wanted == "diffusers" and self.extract is not None)


_LORA_FILES: Mapping[Expert, str] = {
    "high": "pytorch_lora_weights.safetensors",
    "low": "pytorch_lora_weights_transformer_2.safetensors",
}
"""Names of LoRA files in a diffusers pipeline, by expert (transformer of two). diffusers loads the
second one by `load_lora_weights(..., load_into_transformer_2=True)`."""


def header(sampler: Sampler, choice: ExportChoice) -> dict[str, str]:
    """Return what the header of an exported file says of it."""
    facts = sampler.recipe, sampler.components.family, sampler.run, sampler.step
    return describe(*facts, choice.wanted, choice.words, choice.extract)


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
        metadata = header(sampler, choice) if each is parts.model else {}
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
    write_peft_folder(converted, config, folder, header(sampler, choice))
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
    if lora:
        weights = in_dtype(lora, choice.dtype)
    else:
        section = sampler.recipe.model
        model, base = plain_copy(parts.model), section.one_file()
        like = choice.like or (base if base and base.is_file() else None)
        order = "stacked" if choice.like else section.qkv_layout  # the former in ComfyUI's files
        layout = comfyui_layout(model, parts.family, like, order)
        whole = {key: laid.made_of(model.state_dict()) for key, laid in layout.items()}
        is_fp8 = choice.dtype == "fp8_scaled"
        fp8 = in_scaled_fp8(whole, layout, model, parts.family) if is_fp8 else None
        weights = fp8 or in_dtype(whole, choice.dtype)
    write_weights(weights, path, metadata | header(sampler, choice))
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


def _write_extracted(sampler: Sampler, path: Path, choice: ExportChoice, rank: int) -> list[str]:
    """Write the LoRA of a model whose weights were all trained, and return its errors by layer."""
    model, family = plain_copy(sampler.components.model), sampler.components.family
    layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if choice.wanted == "comfyui":
        layers = _known_to_comfyui(layers, family)
    lora = extract_lora(model, sampler.recipe.model, rank, layers)
    weights = in_dtype(lora_named(lora.weights, family, choice.wanted), choice.dtype)
    facts = header(sampler, choice)
    if choice.wanted == "peft":
        from peft import LoraConfig

        # A regular expression: peft takes names in a list for suffixes of further names.
        pattern, base = "|".join(map(re.escape, lora.errors)), sampler.recipe.model.pretrained
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=pattern, inference_mode=True)
        config.base_model_name_or_path = base
        write_peft_folder(weights, config, path, facts)
    else:
        write_weights(weights, path, facts)
    kinds = dict[str, list[str]]()  # from the least to the largest
    for name, error in sorted(lora.errors.items(), key=lambda each: each[1]):
        kinds.setdefault(re.sub(r"\.\d+(?=\.)", ".*", name), []).append(f"{error:.2%}")
    remarks = [
        f"Rank {rank} leaves {lora.total_error:.2%} of the change of all weights (Frobenius norm); "
        "by layer:",
        *(
            f"  {name}: {' to '.join(dict.fromkeys((each[0], each[-1])))}"
            for name, each in kinds.items()
        ),
    ]
    if lora.left_out:
        number = plural(len(lora.left_out), "tensor")
        remarks.append(f"Not in it: {number} that changed, too, such as {lora.left_out[0]}.")
    return [*remarks, *_expert_alone(sampler)]


def _known_to_comfyui(layers: Sequence[str], family: Family) -> list[str]:
    """Return the layers whose LoRA ComfyUI has names for; RecipeError if it has none."""
    known = []
    for name in layers:
        with suppress(errors.RecipeError):
            family.comfyui_name(f"{name}.lora_A.weight", is_lora=True)
            known.append(name)
    if not known:
        family.comfyui_name(f"{layers[0]}.lora_A.weight", is_lora=True)  # raises
    return known


def export(
    sampler: Sampler, out: Path, wanted: Format, dtype: Dtype | None = None, **more: Any
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
        ModelError: the release cannot be read to extract LoRA, or `like` is no file of this model.
        RunError: something is at `out` already, or it cannot be written.
    """
    choice = ExportChoice(wanted, dtype, **more)
    check_export(sampler.recipe, out, choice)
    place = out.resolve()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with fsio.atomic_write(place) if choice.is_file else fsio.atomic_folder(place) as aside:
            if choice.extract is not None:
                return _write_extracted(sampler, aside, choice, choice.extract)
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
    wanted, dtype, words, extract, like, is_pushed = choice
    if choice.is_file:
        if out.suffix != _SUFFIX:
            raise errors.RunError(
                f"--out {out}: expected the name of a {_SUFFIX} file, such as mine{_SUFFIX}."
            )
        if out.exists():
            raise errors.RunError(f"--out {out} is there already. Name a new file.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise errors.RunError(f"--out {out} holds something already. Name a new folder.")
    base = recipe.trainable.base()
    is_said = is_pushed or choice.is_file or base == "lora"
    if words != Words() and not is_said:
        raise errors.RecipeError(
            "--title, --author and --license stand in the header of one file with LoRA or a whole "
            "model, or in a model card (--push): leave them out for a pipeline of a whole model."
        )
    if wanted == "diffusers" and dtype is not None and extract is None:
        raise errors.RecipeError(
            f"--dtype {dtype} is for --format comfyui and peft: the parts of a pipeline keep the "
            "types that they were trained with."
        )
    is_of_release = base == "full" and recipe.model.pretrained is not None
    is_whole_file = (base, wanted, extract) == ("full", "comfyui", None)
    what_is_whole = "a run that trained all weights, with --format comfyui"
    for option, is_set, fits, what in (
        ("--extract-lora", extract, is_of_release, "a run that trained all weights of a release"),
        ("--like", like, is_whole_file, what_is_whole),
        ("--dtype fp8_scaled", dtype == "fp8_scaled", is_whole_file, what_is_whole),
    ):
        if is_set and not fits:
            raise errors.RecipeError(f"{option} is for {what}. Leave it out.")
    if wanted == "peft" and base != "lora" and extract is None:
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
