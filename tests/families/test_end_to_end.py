"""What `longtake init` writes for each release trains, resumes, samples and is exported.

Every verb is called as a user calls it, in this process.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.build import losses, saved
from tests.families.originals import ORIGINAL
from tests.families.rows import transformer_class
from tests.families.tiny import LONG, Tiny, name_optional_pictures, relative, write_clips

from longtake import config
from longtake.data.index import index
from longtake.data.tasks import HERE
from longtake.run_dir import RunDirectory
from longtake.sampling.sampler import load_sampler

_STEPS = 4
_SETTINGS = (
    "model.dtype=fp32",
    "text.dtype=fp32",
    "trainable.rank=2",
    "data.workers=0",
    f"training.steps={_STEPS}",
    "training.global_batch_size=2",
    "training.device=cpu",
    "training.precision=fp32",
    "optimizer.learning_rate=1e-2",
    "optimizer.warmup_steps=0",
    "ema.decay=0.5",
    f"checkpoint.every={_STEPS // 2}",
    f"sampling.every={_STEPS}",
    "sampling.num_inference_steps=1",
    "evaluation.reference_clips=0",
    "watch.enabled=false",
    "tracking.tensorboard=false",
)


@pytest.mark.slow
def test_from_a_release_to_a_pipeline_of_diffusers(
    tiny: Tiny, call_longtake: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed at its middle ends bitwise as it did before."""
    monkeypatch.chdir(tmp_path)
    row = tiny.row
    call_longtake("init", *_base(tiny), "--data", "clips", "--out", "mine.toml")
    fps = config.load(Path("mine.toml")).data.fps or 16.0
    # Beside the clips lie the pictures that recipes of edits look for.
    for seed, folder in enumerate(("clips", *row.pictures)):
        write_clips(Path(folder), row, fps, seed=seed, pictures=folder != "clips")
    index([Path("clips")], captions=None, out=Path("catalogs/clips.parquet"), work=HERE)
    name_optional_pictures(row, Path("mine.toml"))
    settings = [each for key in _settings(tiny) for each in ("--set", key)]
    call_longtake("train", "mine.toml", *settings)
    run = RunDirectory(Path("runs/mine").resolve())
    assert run.evaluation_path("tiny", _STEPS).is_dir()
    at_once, trained = losses(run.recipe()), _saved(run)
    assert len(at_once) == _STEPS

    shutil.rmtree(run.checkpoint_path(_STEPS))  # as if it had been killed
    run.metrics_path.unlink()
    call_longtake("train", "mine.toml", *settings)
    assert losses(run.recipe()) == at_once[_STEPS // 2 :]
    torch.testing.assert_close(_saved(run), trained, rtol=0, atol=0)

    call_longtake("export", "runs/mine", "--out", "exported")
    released, expected = (
        tiny.steps(pipeline, 2, row.guidance, LONG)[-1].after
        for pipeline in (tiny.released, tiny.pipeline(tmp_path / "exported"))
    )
    found = tiny.sampled(load_sampler(run.path, device="cpu"), 2)
    assert relative(found, expected) <= 1e-5
    assert relative(found, released) > 1e-4


def _base(tiny: Tiny) -> list[object]:
    """What the run begins with: one file in the original layout, or else the release."""
    release, layout = tiny.folder / "release", ORIGINAL.get(transformer_class(tiny.row))
    if layout is None:
        return [release]
    weights = tiny.sampler.components.model.state_dict()
    named = {f"model.diffusion_model.{name}": each for name, each in layout(weights).items()}
    save_file({name: each.contiguous() for name, each in named.items()}, "model.safetensors")
    return ["model.safetensors", "--config-from", release]


def _saved(run: RunDirectory) -> list[dict[str, Any]]:
    return [saved(run.recipe(), _STEPS, name) for name in ("model", "ema/main", "optimizer")]


def _settings(tiny: Tiny) -> list[str]:
    """What makes a recipe of the release one of a tiny run on a CPU."""
    frames, height, width = tiny.row.bucket
    pictures = ", ".join(f'{name} = ["{path}"]' for name, path in tiny.pictures(0).items())
    preset = f'{{prompts = ["a red circle"], conditioning = {{{pictures}}}}}'
    more = [
        f"data.buckets=[{{num_frames = {frames}, height = {height}, width = {width}}}]",
        f"evaluation.presets.tiny={preset}",
    ]
    if (length := tiny.row.keys.get("text", {}).get("max_tokens")) is not None:
        more.append(f"text.max_tokens={length}")
    if (audio := tiny.row.keys.get("model", {}).get("audio")) is not None:
        more.append(f"model.audio={audio}")
    return [*_SETTINGS, *more]
