"""Fixtures that more than one room's tests need."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from longtake import config
from longtake.config import Recipe
from longtake.data.index import index
from longtake.demo.shapes import write_clips

_MATERIAL = Path(__file__).resolve().parents[2] / "shared" / "material"


@pytest.fixture(scope="session")
def material() -> Path:
    """The folder of real clips, damaged clips and exact numbers; skips where it is not at hand."""
    if not (_MATERIAL / "MATERIAL.md").is_file():
        pytest.skip(f"real material is not at hand (looked for {_MATERIAL})")
    return _MATERIAL.resolve()


@pytest.fixture(scope="session")
def shapes_catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of 64 clips (8 frames of 32 x 32, captioned); copy its folder to change a clip."""
    folder = tmp_path_factory.mktemp("shapes")
    captions = write_clips(folder / "clips", num_clips=64, seed=0)
    out = folder / "catalog.parquet"
    index([folder / "clips"], captions=captions, out=out)
    return out


_SMALL_RECIPE = """
[data]
buckets = [{ num_frames = 8, height = 32, width = 32 }]
workers = 0
[model]
family = "tubelet"
config = { hidden_size = 48, num_blocks = 2 }
[text]
max_tokens = 6
[flow]
mean = 2.0
[optimizer]
learning_rate = 3e-3
warmup_steps = 4
[training]
steps = 12
batch_size = 4
device = "cpu"
precision = "fp32"
[ema]
decay = 0.9
[checkpoint]
every = 6
"""


@pytest.fixture
def small_recipe(shapes_catalog: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """Makes recipes of a run of a second: `small_recipe("training.steps=8")`, in tmp_path/run."""
    path = tmp_path / "small.toml"
    path.write_text(_SMALL_RECIPE)
    always = (f"out={tmp_path / 'run'}", f"data.catalog={shapes_catalog}")
    return lambda *changes: config.load(path, (*always, *changes))


@pytest.fixture
def on_two_processes() -> list[str]:
    """A command to which a Python file, or -m and a module, is appended."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", "2"]


@pytest.fixture
def run_on_two_ranks(on_two_processes: list[str]) -> Callable[..., None]:
    """Runs a Python file as two ranks and shows what they said if one of them failed."""

    def run(file: str, *arguments: str) -> None:
        command, folder = [*on_two_processes, file, *arguments], Path(file).parent
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=100, check=False, cwd=folder
        )
        assert ended.returncode == 0, ended.stderr

    return run
