"""Runs and checkpoints that somebody else made: verbs read them, and run nothing of them."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.checkpoint import manifest

Call = Callable[..., tuple[int, str, str]]


class _Touches:
    """Unpickled by `pickle.load`, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def theirs(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that can be changed."""
    monkeypatch.setattr("longtake.evaluation.server.start._be_modest", lambda device: None)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place / "run", tmp_path / "theirs")
    recipe = tmp_path / "theirs" / "recipe.toml"
    text = recipe.read_text().replace("steps = 2\n", "steps = 3\n")
    size = "num_frames = 8\nheight = 32\nwidth = 32"
    text += f'\n[evaluation.presets.mine]\nprompts = ["a red square"]\nseeds = [0]\n{size}\n'
    recipe.write_text(text.replace("tensorboard = true", "tensorboard = false"))
    return tmp_path / "theirs"


def _recommit(checkpoint: Path) -> None:
    """COMMITTED lies beside the files, so whoever changes them can change it."""
    manifest.commit(checkpoint, manifest.describe(checkpoint, manifest.file_names(checkpoint)))


_VERBS = {
    "sample": ("sample", "{run}", "--prompt", "x", "--out", "o.mp4", "--steps", "1"),
    "export": ("export", "{run}", "--out", "exported"),
    "evaluate": ("evaluate", "{run}", "--preset", "mine", "--device", "cpu"),
    "train": ("train", "{run}/recipe.toml", "--set", "out={run}"),
}


@pytest.mark.parametrize("verb", _VERBS)
def test_no_verb_runs_the_code_in_a_checkpoint(verb: str, theirs: Path, call: Call) -> None:
    """A `.metadata` with true checksums that would run a command is refused by name."""
    [checkpoint] = (theirs / "checkpoints").glob("step_*")
    ran = theirs.parent / "ran"
    for path in checkpoint.rglob(".metadata"):
        path.write_bytes(pickle.dumps(_Touches(ran)))
    _recommit(checkpoint)
    code, out, err = call(*(each.format(run=theirs) for each in _VERBS[verb]))
    assert not ran.exists()
    assert code in (1, 2)
    assert "it wants posix.system, which is not allowed" in err + out
    assert "Traceback" not in err


def test_no_code_is_run_by_the_optimizers_objects(theirs: Path, call: Call) -> None:
    """What is not a tensor is a pickle too, inside a file of its own kind."""
    [checkpoint] = (theirs / "checkpoints").glob("step_*")
    ran, hostile = theirs.parent / "ran", io.BytesIO()
    torch.save(_Touches(ran), hostile)
    found = pickle.loads((checkpoint / "optimizer" / ".metadata").read_bytes())  # noqa: S301
    objects = [
        index
        for index in found.storage_data
        if type(found.state_dict_metadata[index.fqn]).__name__ == "BytesStorageMetadata"
    ]
    assert objects
    for index in objects:
        place = found.storage_data[index]
        place.relative_path, place.offset = "hostile", 0
        place.length = len(hostile.getvalue())
    (checkpoint / "optimizer" / "hostile").write_bytes(hostile.getvalue())
    (checkpoint / "optimizer" / ".metadata").write_bytes(pickle.dumps(found))
    _recommit(checkpoint)
    code, _, err = call("train", theirs / "recipe.toml", "--set", f"out={theirs}")
    assert not ran.exists()
    assert code == 2
    assert "cannot be loaded" in err


def test_a_damaged_checkpoint_is_not_unpickled(theirs: Path, call: Call) -> None:
    """Checksums are compared first, and the sentence says that it is damaged."""
    [checkpoint] = (theirs / "checkpoints").glob("step_*")
    for path in checkpoint.rglob(".metadata"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x40
        path.write_bytes(data)
    code, _, err = call("sample", theirs, "--prompt", "x", "--out", "o.mp4")
    assert code == 2
    assert "has other bytes than were saved" in err
