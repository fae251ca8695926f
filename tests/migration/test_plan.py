"""`longtake plan` accepts recipes of configurations of each trainer, with a tiny release."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.families.rows import ROWS

from longtake.data.encode import write_video
from longtake.migration.migrate import migrate
from longtake.migration.settle import Answers
from longtake.process import program

_CONFIGS = Path(__file__).parent / "configs"


def _clips(folder: Path, *, is_video: bool, seed: int) -> None:
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    for number in range(8):
        path = folder / f"clip{number}"
        frames = random.integers(0, 255, (90 if is_video else 1, 256, 256, 3), np.uint8)
        if is_video:
            write_video(path.with_suffix(".mp4"), frames, fps=16)
        else:
            Image.fromarray(frames[0]).save(path.with_suffix(".png"))
        path.with_suffix(".txt").write_text("a red circle")


@pytest.mark.drill
@pytest.mark.parametrize(
    ("name", "kind", "folders"),
    [
        ("dp_kontext", "FLUX.1 Kontext", ("target", "control")),
        ("dp_wan21_min_vram", "Wan 2.1 T2V", ("clips", "masks")),
        ("at_wan21_video", "Wan 2.1 T2V", ("clips",)),
        ("musubi_qwen_edit", "Qwen-Image-Edit-2511", ("after", "before")),
        ("sd_flux_toml", "FLUX.1", ("dog", "other", "masks")),
        ("st_kontext", "FLUX.1 Kontext", ("after", "before")),
        ("ot_flux2_finetune", "FLUX.2 klein", ("a",)),
    ],
)
def test_plan_accepts_a_recipe(
    tmp_path: Path, name: str, kind: str, folders: tuple[str, ...]
) -> None:
    next(row for row in ROWS if row.kind == kind).make(tmp_path / "release")
    files = [file for file in sorted((_CONFIGS / name).iterdir()) if file.name != "expected.toml"]
    done = migrate(files, Path("mine.toml"), Answers(release=str(tmp_path / "release"), gpus=1))
    (tmp_path / "mine.toml").write_text(done.text)
    for seed, folder in enumerate(folders):
        _clips(tmp_path / folder, is_video=folder == "clips", seed=seed)
    commands = [
        ["data", "index", folder, "--out", f"catalogs/{folder}.parquet"]
        for folder in folders
        if f"catalogs/{folder}.parquet" in done.text
    ]
    plan = ["plan", "mine.toml", "--device", "24GiB,165TFLOPS"]
    for command in [*commands, plan]:
        ran = subprocess.run(
            program("longtake", *command), capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
