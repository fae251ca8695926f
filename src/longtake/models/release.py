"""Released models: what their configurations say, and which ones longtake does not train.

The configurations of models that people start from are shipped; those of others are read from
their folder, or are the only files that are downloaded.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from longtake.config import ModelSection, Shift
from longtake.errors import ModelError
from longtake.models.pretrained import defaults, locate

SHIPPED = {
    "black-forest-labs/FLUX.1-dev": "flux_1_dev.json",
    "black-forest-labs/FLUX.1-Kontext-dev": "flux_1_dev.json",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan_2_1_1_3b.json",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "wan_2_1_14b.json",
}
"""Repository ids whose configurations come with longtake; Kontext's are those of FLUX.1-dev."""


@dataclass(frozen=True)
class Release:
    """What the files of a pretrained model say about it."""

    config: Mapping[str, Any]  # the transformer's; of a model from scratch the recipe's
    scheduler: Mapping[str, Any] | None  # None: the pipeline has none, or the model is from scratch
    pipeline: Mapping[str, Any]  # model_index.json; empty if there is none


def read_release(section: ModelSection) -> Release:
    """The configurations of the model that a section starts from."""
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
        read_config(scheduler) if scheduler.is_file() else None,
        read_config(index) if index.is_file() else {},
    )


_read_repository = cache(_read_release)  # one request to the hub


def part_config(where: str, subfolder: str) -> dict[str, Any]:
    """The `config.json` of one part of a pipeline, from a folder, the shipped ones or the hub."""
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
    return read_config(folder / subfolder / "config.json")


@cache
def _shipped(name: str) -> dict[str, Any]:
    return read_config(Path(__file__).parent / "architectures" / name)


def read_config(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a pipeline."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}. Expected what save_pretrained writes."
        ) from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds no configuration. Expected what save_pretrained writes.")
    return values


def scheduler_shift(scheduler: Mapping[str, Any] | None, otherwise: Shift) -> Shift:
    """The shift in a pipeline's scheduler_config.json; dynamic shifting is FLUX's rule, `flux`."""
    if scheduler is None:
        return otherwise
    if scheduler.get("use_dynamic_shifting"):
        return "flux"
    shift = scheduler.get("flow_shift", scheduler.get("shift"))
    return float(shift) if isinstance(shift, int | float) and shift > 0 else otherwise


_TARGETS = {
    "epsilon": "the noise (epsilon)",
    "v_prediction": "a mixture of noise and latents (v-prediction)",
    "sample": "the latents themselves",
}
"""By `prediction_type` of diffusers' schedulers that do no flow matching."""


def refuse_other_objectives(scheduler: Mapping[str, Any] | None, where: str) -> None:
    """Refuse a checkpoint whose scheduler states another objective than flow matching."""
    if scheduler is None:
        return
    name = str(scheduler.get("_class_name", ""))
    predicts = scheduler.get("prediction_type")
    if not predicts:
        import diffusers

        found = getattr(diffusers, name, None)
        predicts = found and defaults(found.__init__).get("prediction_type")
    if name.startswith("FlowMatch") or predicts not in _TARGETS:
        return
    raise ModelError(
        f"{where} predicts {_TARGETS[predicts]}, as its scheduler says ({name}, prediction_type "
        f"{predicts}). longtake trains by flow matching, toward the velocity noise - latents: that "
        "is another target, along another path of noise levels, so training would undo what this "
        "checkpoint has learned. Start from a flow-matching checkpoint, such as Wan 2.1 or FLUX.1."
    )


def refuse_experts(pipeline: Mapping[str, Any], where: str) -> None:
    """Refuse a pipeline with two transformers, or a boundary between them."""
    second = pipeline.get("transformer_2") or (None, None)
    boundary = pipeline.get("boundary_ratio")
    if second[0] is None and boundary is None:
        return
    at = "" if boundary is None else f" (boundary_ratio {boundary})"
    raise ModelError(
        f"{where} has two transformers, each for a part of the noise levels{at}, as Wan 2.2 A14B "
        "has. longtake would train one of them on all noise levels, most of which it never serves. "
        "Start from a model with one transformer, such as Wan-AI/Wan2.1-T2V-14B-Diffusers."
    )


def refuse_further_inputs(release: Release, variants: Mapping[float, str], where: str) -> None:
    """Refuse a transformer that takes more channels than it returns (image, mask, control)."""
    takes, returns = release.config.get("in_channels"), release.config.get("out_channels")
    if not takes or not returns or takes <= returns:  # FLUX's out_channels is None if equal
        return
    name = str(release.config.get("_class_name"))
    variant = variants.get(takes / returns, f"a variant of {name} with further inputs")
    index = release.pipeline
    of_pipeline = f", {index['_class_name']}" if "_class_name" in index else ""
    raise ModelError(
        f"{where} is {variant} (in_channels {takes}, out_channels {returns}{of_pipeline}). "
        "longtake trains text-to-video (Wan), text-to-image (FLUX.1-dev, FLUX.1-schnell) and "
        "FLUX.1-Kontext. Start from one of these."
    )
