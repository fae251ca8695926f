"""What a model looks like, without its weights.

The configurations of the models that people start from are shipped, as plain facts; those of others
are read from their folder, or are the only file that is downloaded.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longtake.config import ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.models.objective import (
    refuse_experts,
    refuse_further_inputs,
    refuse_other_objectives,
)
from longtake.models.pretrained import (
    construct,
    load_pretrained,
    locate,
    quiet,
    refuse_other_class,
    refuse_unused,
)
from longtake.models.unfilled import Weights


@dataclass(frozen=True)
class Release:
    config: Mapping[str, Any]  # the transformer's; of a model from scratch the recipe's
    scheduler: Mapping[str, Any] | None  # None: the pipeline has none, or the model is from scratch
    pipeline: Mapping[str, Any]  # model_index.json; empty if there is none


SHIPPED = {
    "black-forest-labs/FLUX.1-dev": "flux_1_dev.json",
    "black-forest-labs/FLUX.1-Kontext-dev": "flux_1_dev.json",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan_2_1_1_3b.json",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "wan_2_1_14b.json",
}
"""Repository ids whose configurations come with longtake; Kontext's are those of FLUX.1-dev."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What a recipe calls them."""


def build_transformer(
    model_class: Any, section: ModelSection, fitted: dict[str, int], *, weights: Weights
) -> nn.Module:
    """A transformer of diffusers: pretrained in the section's dtype, or random in fp32.

    Raises:
        RecipeError: an argument is wrong, or the transformer takes other latents or captions.
        ModelError: weights or configuration cannot be loaded, or were trained toward another
            target.
    """
    if section.pretrained is None:
        with torch.device("cpu" if weights else "meta"):
            model = construct("model.config", model_class, fitted | section.config)
    else:
        refuse_unused("model", {"config": section.config}, "model.pretrained brings its own")
        build = {True: _load, False: _outline, "later": _build_for_files}[weights]
        model = build(model_class, section)
    for name, expected in fitted.items():
        if model.config[name] != expected:
            raise RecipeError(
                f"The transformer's {name} is {model.config[name]}, but codec and text encoder "
                f"give {expected}. Use the codec and text encoder that belong to it."
            )
    built: nn.Module = model
    return built


def read_release(section: ModelSection) -> Release:
    """The configurations of the model that a section starts from.

    Raises:
        ModelError: the configuration of a pretrained transformer cannot be found.
    """
    where = section.pretrained
    if where is None:
        return Release(section.config, None, {})
    if Path(where).expanduser().is_dir():
        return _read_release(where, section.subfolder)
    return _read_repository(where, section.subfolder)


def _read_release(where: str, subfolder: str) -> Release:
    config = part_config(where, subfolder)
    if where in SHIPPED and not Path(where).is_dir():
        return Release(config, _shipped(SHIPPED[where]).get("scheduler"), {})
    root = (locate(where, subfolder, files="config.json") / subfolder).resolve().parent
    scheduler = root / "scheduler" / "scheduler_config.json"
    index = root / "model_index.json"
    return Release(
        config,
        _read(scheduler) if scheduler.is_file() else None,
        _read(index) if index.is_file() else {},
    )


_read_repository = cache(_read_release)
"""The hub is asked once."""


def on_meta(model_class: Any, where: str, subfolder: str) -> nn.Module:
    """A model of diffusers or transformers on the meta device, in the dtype its config names.

    Raises:
        ModelError: there is no configuration, or it does not fit the class.
    """
    config = part_config(where, subfolder)
    refuse_other_class(config, model_class, where, subfolder)
    with torch.device("meta"):
        return _from_config(model_class, config, where, subfolder)


def _from_config(model_class: Any, config: dict[str, Any], where: str, subfolder: str) -> nn.Module:
    """A model of diffusers or transformers in the dtype its config names, without its weights."""
    try:
        with quiet(model_class):
            if hasattr(model_class, "load_config"):  # diffusers
                model: nn.Module = model_class.from_config(config)
            else:
                model = model_class(model_class.config_class.from_dict(config))
    except Exception as error:  # there is no end to how wrong sizes fail inside a constructor
        raise ModelError(
            f"{where}: the configuration of its {subfolder} does not fit {model_class.__name__}: "
            f"{error}. Check the class name and the folder."
        ) from error
    stored = config.get("torch_dtype") or config.get("dtype") or "float32"
    keep_weights_in(model, getattr(torch, str(stored)))
    return model


def keep_weights_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Put a model's weights into a dtype, one after the other, so that no two copies of all exist.

    What a class of diffusers says must be in fp32 is, as `from_pretrained(torch_dtype=...)` has it:
    so a pipeline in bf16 runs the same model. Buffers stay as they are: they hold positions, for
    which bf16 is too coarse.
    """
    exact = set(_parts_in_fp32(model))
    for name, parameter in model.named_parameters():
        kept = dtype if exact.isdisjoint(name.split(".")) else torch.float32
        parameter.data = parameter.data.to(kept)


def _parts_in_fp32(model: nn.Module) -> list[str]:
    """Parts of names; transformers has a list of that name too, but means fp16 alone by it."""
    is_of_diffusers = hasattr(model, "load_config")
    return getattr(model, "_keep_in_fp32_modules", None) or [] if is_of_diffusers else []


def part_config(where: str, subfolder: str) -> dict[str, Any]:
    """The `config.json` of one part of a pipeline, from a folder, the shipped ones or the hub.

    Raises:
        ModelError: there is none.
    """
    if where in SHIPPED and not Path(where).is_dir():
        parts = _shipped(SHIPPED[where])
        if subfolder in parts:
            return dict(parts[subfolder])
        known = ", ".join(part for part in parts if part != "scheduler")
        raise ModelError(f"{where} has no subfolder {subfolder}; it has {known}.")
    try:
        folder = locate(where, subfolder, files="config.json")
    except ModelError as error:
        raise ModelError(f"{error} Known without a download are: {', '.join(SHIPPED)}.") from error
    return _read(folder / subfolder / "config.json")


def _load(model_class: Any, section: ModelSection) -> nn.Module:
    """With weights; they pass through no other dtype than the one they will be kept in."""
    folder, _ = _checked(model_class, section)
    dtype = DTYPES[section.dtype]
    model: nn.Module = load_pretrained(
        model_class, str(folder), section.subfolder, torch_dtype=dtype
    )
    return model


def _build_for_files(model_class: Any, section: ModelSection) -> nn.Module:
    """Like what `_load` returns, for somebody else to fill."""
    assert section.pretrained is not None
    folder, config = _checked(model_class, section)
    model: Any = _from_config(model_class, config, section.pretrained, section.subfolder)
    model.register_to_config(_name_or_path=str(folder / section.subfolder))
    built: nn.Module = model.eval()
    return built


def _checked(model_class: Any, section: ModelSection) -> tuple[Path, dict[str, Any]]:
    """The local folder that has a section's transformer, which fits; and its configuration."""
    assert section.pretrained is not None
    folder = locate(section.pretrained, section.subfolder)
    _refuse_other_release(model_class, section)
    return folder, _read(folder / section.subfolder / "config.json")


def _outline(model_class: Any, section: ModelSection) -> nn.Module:
    assert section.pretrained is not None
    _refuse_other_release(model_class, section)
    return on_meta(model_class, section.pretrained, section.subfolder)


def _refuse_other_release(model_class: Any, section: ModelSection) -> None:
    """Refuse what longtake does not train, before any weight is read."""
    assert section.pretrained is not None
    release = read_release(section)
    refuse_other_class(release.config, model_class, section.pretrained, section.subfolder)
    refuse_other_objectives(release.scheduler, section.pretrained)
    refuse_experts(release.pipeline, section.pretrained)
    refuse_further_inputs(release.config, release.pipeline, section.pretrained)


@cache
def _shipped(name: str) -> dict[str, Any]:
    return _read(Path(__file__).parent / "architectures" / name)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}. Expected what save_pretrained writes."
        ) from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds no configuration. Expected what save_pretrained writes.")
    return values
