"""A release with a modular pipeline alone is read as another one, and an export is one again."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from tests.families import modular, release_flux2, release_flux3
from tests.models.tiny import write_configs

from longtake.config import ModelSection
from longtake.errors import ModelError
from longtake.models.modular import save_pipeline
from longtake.models.pretrained import PipelinePart, locate
from longtake.models.releases import MODULAR_INDEX, find_part, has_part, read_release

_CONFIG = {"_class_name": "Flux3Transformer2DModel"}


def _entry(library: str, name: str, *, loaded: bool, **spec: Any) -> list[Any]:
    return [*([library, name] if loaded else [None, None]), {"type_hint": [library, name], **spec}]


def _write(folder: Path, **entries: Any) -> str:
    index = {"_class_name": "Flux3ModularPipeline", "_blocks_class_name": "Flux3AutoBlocks"}
    files = {MODULAR_INDEX: index | entries, "transformer/config.json": _CONFIG}
    return write_configs(folder, {**files, "scheduler/scheduler_config.json": {"shift": 2.0}})


@pytest.mark.parametrize("loaded", [True, False])
def test_its_index_names_parts_as_an_ordinary_one(tmp_path: Path, loaded: bool) -> None:
    where = _write(tmp_path, vae=_entry("diffusers", "AutoencoderKLFlux2", loaded=loaded), x=True)
    release = read_release(ModelSection(family="flux3", pretrained=where))
    assert release.pipeline["vae"] == ["diffusers", "AutoencoderKLFlux2"]
    assert release.pipeline["x"] is True
    assert find_part(where, PipelinePart(("AutoencoderKLFlux2",), "vae")).folder == "vae"
    assert has_part(where, PipelinePart(("AutoencoderKLFlux2",), "vae"))
    with pytest.raises(ModelError, match="names AutoencoderKLFlux2 as its vae, but AutoencoderKL "):
        find_part(where, PipelinePart(("AutoencoderKL",), "vae"))


def test_its_scheduler_is_read_where_the_index_names_it(tmp_path: Path) -> None:
    """By the defaults of its blocks diffusers makes one otherwise."""
    section = ModelSection(family="flux3", pretrained=_write(tmp_path))
    assert read_release(section).scheduler is None
    _write(tmp_path, scheduler=_entry("diffusers", "FlowMatchEulerDiscreteScheduler", loaded=True))
    assert read_release(section).scheduler == {"shift": 2.0}


def test_a_part_of_another_repository_is_named_and_not_followed(tmp_path: Path) -> None:
    place = {"pretrained_model_name_or_path": "their/vae\x1b[2J", "subfolder": "vae"}
    where = _write(tmp_path, vae=_entry("diffusers", "AutoencoderKLFlux2", loaded=False, **place))
    with pytest.raises(
        ModelError, match=r"no subfolder vae; .* takes it from their/vae\\x1b\[2J.*codec or text"
    ):
        locate(where, "vae")
    _write(tmp_path, vae="broken")
    with pytest.raises(ModelError, match="no subfolder vae; it has scheduler, transformer"):
        locate(where, "vae")


def test_diffusers_loads_an_export_wherever_it_is_moved(tmp_path: Path) -> None:
    upsampler = _entry(
        "transformers", "Qwen3_5ForConditionalGeneration", loaded=False, subfolder="up"
    )
    where = _write(tmp_path / "release", prompt_upsampler=upsampler)
    components = {
        "vae": release_flux2.vae(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=2.5),
        "transformer": release_flux3.transformer(),
    }
    section = ModelSection(family="flux3", pretrained=where)
    save_pipeline(diffusers.Flux3ModularPipeline, components, section, tmp_path / "first")
    moved = (tmp_path / "first").rename(tmp_path / "moved")
    index = json.loads((moved / MODULAR_INDEX).read_text())
    assert index["prompt_upsampler"][2]["pretrained_model_name_or_path"] == where
    loaded = modular.load(moved, ("prompt_upsampler", "text_encoder"))
    assert loaded.scheduler.config.shift == 2.5
    for name in ("vae", "transformer"):
        found = getattr(loaded, name).state_dict()
        for key, value in components[name].state_dict().items():
            assert torch.equal(found[key], value), key
