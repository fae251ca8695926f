"""What unset keys stand for: as the released pipelines have it, by the files beside the weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from longtake.config import ModelSection, Recipe, parse
from longtake.models.base import Defaults, family
from longtake.models.build import text_section

_DEV = {"use_dynamic_shifting": True, "shift": 3.0, "base_shift": 0.5, "max_shift": 1.15}
_SCHNELL = {"use_dynamic_shifting": False, "shift": 1.0, "base_shift": 0.5, "max_shift": 1.15}
_UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "flow_shift": 7.0,
    "use_dynamic_shifting": False,
}


def _folder(folder: Path, scheduler: dict[str, Any], **config: Any) -> str:
    for name, values in {
        "transformer/config.json": config,
        "scheduler/scheduler_config.json": scheduler,
    }.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(
    ("name", "scheduler", "guidance_embeds", "expected"),
    [
        ("wan", _UNIPC, None, Defaults(7.0, 5.0, 50, 0.1, 512)),
        ("flux", _DEV, True, Defaults("flux", 3.5, 28, 0.0, 512)),
        ("flux_kontext", _DEV, True, Defaults("flux", 2.5, 28, 0.0, 512)),
        ("flux", _SCHNELL, False, Defaults(1.0, 1.0, 4, 0.0, 256)),
        ("flux", _DEV, False, Defaults("flux", 5.0, 28, 0.1, 512)),
    ],
)
def test_defaults_are_those_of_the_release(
    name: str,
    scheduler: dict[str, Any],
    guidance_embeds: bool | None,
    expected: Defaults,
    tmp_path: Path,
) -> None:
    """FLUX.1-schnell is told from a model that is not distilled by its scheduler."""
    config = {} if guidance_embeds is None else {"guidance_embeds": guidance_embeds}
    section = ModelSection(family=name, pretrained=_folder(tmp_path, scheduler, **config))
    assert family(name).defaults(section) == expected


@pytest.mark.parametrize(
    ("repository", "shift"),
    [("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 3.0), ("Wan-AI/Wan2.1-T2V-14B-Diffusers", 5.0)],
)
def test_shipped_releases_need_no_download(repository: str, shift: float) -> None:
    """Their schedulers come with longtake."""
    assert family("wan").defaults(ModelSection(family="wan", pretrained=repository)).shift == shift


def test_captions_are_as_long_as_the_release_expects(tmp_path: Path) -> None:
    """512 tokens for a pretrained encoder, 256 for schnell, 64 for an encoder from scratch."""
    schnell = _folder(tmp_path, _SCHNELL, guidance_embeds=False)
    wan = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    found = {
        (model, text): text_section(_recipe(name, model, text)).num_tokens()
        for name, model, text in (
            ("wan", wan, wan),
            ("flux", schnell, schnell),
            ("flux", schnell, None),
            ("wan", None, wan),
        )
    }
    assert list(found.values()) == [512, 256, 64, 512]
    assert text_section(_recipe("wan", wan, wan, max_tokens=100)).num_tokens() == 100


def _recipe(name: str, model: str | None, text: str | None, **changes: Any) -> Recipe:
    values = {
        "out": "run",
        "data": {"catalog": "c.parquet", "buckets": [{"num_frames": 1, "height": 16, "width": 16}]},
        "model": {"family": name, "pretrained": model},
        "text": {"kind": "transformers", "pretrained": text, **changes},
        "training": {"steps": 1, "batch_size": 1},
    }
    return parse(values, source="test")
