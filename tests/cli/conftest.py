"""A command line to call, and a place that has a run and much that is not what it seems."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.data.catalogs import make_catalog

from longtake import cli, fsio
from longtake.data.catalog import Catalog

Call = Callable[..., tuple[int, str, str]]
CallJson = Callable[..., Any]
Refuse = Callable[..., str]

_RECIPE = """
out = "{place}/run"
[data]
catalog = "{catalog}"
buckets = [{{ num_frames = 8, height = 32, width = 32 }}]
[model]
family = "tubelet"
config = {{ hidden_size = 24, num_heads = 2, num_blocks = 1 }}
[text]
max_tokens = 6
[optimizer]
learning_rate = 1e-3
[training]
steps = 2
global_batch_size = 4
precision = "fp32"
[sampling]
num_inference_steps = 2
"""


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls longtake as the shell does: gives the exit code, stdout and stderr."""
    # What is told of phases that last depends on the machine's load.
    monkeypatch.setattr("longtake.progress._SECONDS_OF_A_LONG_PHASE", float("inf"))

    def called(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["longtake", *map(str, arguments)])
        capsys.readouterr()
        fsio.skipped_lines()  # those of other tests
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return int(exit_.value.code or 0), *capsys.readouterr()

    return called


@pytest.fixture
def refuse(call: Call) -> Refuse:
    """Calls longtake where it must refuse, in a sentence and with exit code 2; gives the text."""

    def refused(*arguments: object) -> str:
        code, out, err = call(*arguments)
        assert (code, out) == (2, ""), err
        assert err.startswith("longtake: ")
        assert "Traceback" not in err
        return err

    return refused


@pytest.fixture
def call_json(call: Call) -> CallJson:
    """Calls longtake with --json, where it must succeed; gives the parsed answer.

    Nothing may be printed beside it, unless `says_more`.
    """

    def called(*arguments: object, says_more: bool = False) -> Any:
        code, out, err = call(*arguments, "--json")
        assert code == 0, err
        assert says_more or not err
        return json.loads(out)

    return called


@pytest.fixture(scope="session")
def place(shapes_catalog: Path, warm: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run, its recipe, and much that is not what it seems."""
    place = tmp_path_factory.mktemp("place")
    (place / "recipe.toml").write_text(_RECIPE.format(place=place, catalog=shapes_catalog))
    (place / "file").write_text("not a folder")
    (place / "empty").mkdir()
    (place / "damaged").mkdir()
    (place / "damaged" / "page.mp4").write_text("<html>404</html>")
    (place / "damaged" / "nothing.mkv").touch()
    catalog = Catalog.load(shapes_catalog)
    silent = [dataclasses.replace(clip, caption="") for clip in catalog.clips()]
    make_catalog(silent).save(place / "silent.parquet")
    command = [*warm, "1", "-m", "longtake", "train", str(place / "recipe.toml"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2
    begun = place / "begun"
    shutil.copytree(place / "run", begun)
    shutil.rmtree(begun / "checkpoints")
    return place


@pytest.fixture
def run(place: Path, tmp_path: Path) -> Path:
    """A copy of a trained run."""
    shutil.copytree(place / "run", tmp_path / "run", ignore=shutil.ignore_patterns("tensorboard"))
    return tmp_path / "run"


@pytest.fixture
def catalog(shapes_catalog: Path, tmp_path: Path) -> Path:
    """A catalog of the 64 clips that a test may change."""
    path = tmp_path / "catalog.parquet"
    Catalog.load(shapes_catalog).save(path)
    return path
