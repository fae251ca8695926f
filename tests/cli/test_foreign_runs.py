"""Runs and checkpoints that somebody else made: verbs read them, and run nothing of them."""

import io
import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Call, Refuse

from longtake.checkpoint import files
from longtake.errors import RecipeError
from longtake.monitor.reporting import watch_target
from longtake.sampling.preset_files import find_file


class _Touches:
    """Unpickled by `pickle.load`, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def theirs(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("longtake.evaluation.server._lower_priority", lambda device: None)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place / "run", tmp_path / "theirs")
    recipe = tmp_path / "theirs" / "recipe.toml"
    text = recipe.read_text().replace("steps = 2\n", "steps = 3\n")
    size = "num_frames = 8\nheight = 32\nwidth = 32"
    text += f'\n[evaluation.presets.mine]\nprompts = ["a red square"]\nseeds = [0]\n{size}\n'
    recipe.write_text(text.replace("tensorboard = true", "tensorboard = false"))
    return tmp_path / "theirs"


def _checkpoint_of(run: Path) -> Path:
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    return checkpoint


def _recommit(checkpoint: Path) -> None:
    """COMMITTED lies beside the files, so whoever changes them can change it."""
    files.commit(checkpoint, files.describe_files(checkpoint, files.list_files(checkpoint)))


_VERBS = {
    "sample": ("sample", "{run}", "--prompt", "x", "--out", "o.mp4", "--steps", "1"),
    "export": ("export", "{run}", "--out", "exported"),
    "evaluate": ("evaluate", "{run}", "--preset", "mine", "--device", "cpu"),
    "train": ("train", "{run}/recipe.toml", "--set", "out={run}"),
}


@pytest.mark.parametrize("verb", _VERBS)
def test_no_verb_runs_the_code_in_a_checkpoint(verb: str, theirs: Path, call: Call) -> None:
    """A `.metadata` with true checksums that would run a command is refused by name."""
    checkpoint, ran = _checkpoint_of(theirs), theirs.parent / "ran"
    for path in checkpoint.rglob(".metadata"):
        path.write_bytes(pickle.dumps(_Touches(ran)))
    _recommit(checkpoint)
    code, out, err = call(*(each.format(run=theirs) for each in _VERBS[verb]))
    assert not ran.exists()
    assert code in (1, 2)
    assert "it wants posix.system, which is not allowed" in err + out
    assert "Traceback" not in err


def test_no_code_is_run_by_the_optimizers_objects(theirs: Path, refuse: Refuse) -> None:
    """What is not a tensor is a pickle too, inside a file of its own kind."""
    checkpoint, ran, hostile = _checkpoint_of(theirs), theirs.parent / "ran", io.BytesIO()
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
    said = refuse("train", theirs / "recipe.toml", "--set", f"out={theirs}")
    assert not ran.exists()
    assert "cannot be loaded" in said


def test_a_damaged_checkpoint_is_not_unpickled(theirs: Path, refuse: Refuse) -> None:
    """Checksums are compared first, and the sentence says that it is damaged."""
    for path in _checkpoint_of(theirs).rglob(".metadata"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x40
        path.write_bytes(data)
    said = refuse("sample", theirs, "--prompt", "x", "--out", "o.mp4")
    assert ".metadata has other bytes than were saved" in said


_EVIL = "from pathlib import Path\nPath({ran!r}).touch()\nclass Cls: ...\n"


def _names_module(run: Path, module: str) -> None:
    recipe = run / "recipe.toml"
    text = recipe.read_text()
    assert "[trainable]" in text
    recipe.write_text(f'{text}\n[trainable.modules.own]\nmodule = "{module}"\n')


@pytest.mark.parametrize(
    ("verb", "place_of_module"),
    [
        *((verb, "theirs.evil") for verb in _VERBS),
        ("sample", "theirs.package.evil"),
        ("sample", "theirs.ns.evil"),
    ],
)
def test_no_verb_imports_from_a_run(
    verb: str, place_of_module: str, theirs: Path, call: Call
) -> None:
    """Not even from one's own, where somebody may have put a file."""
    ran = theirs.parent / "ran"
    (theirs / "package").mkdir()
    (theirs / "package" / "__init__.py").write_text(_EVIL.format(ran=str(ran)))
    for folder in (theirs, theirs / "package", theirs / "ns"):
        folder.mkdir(exist_ok=True)
        (folder / "evil.py").write_text(_EVIL.format(ran=str(ran)))
    _names_module(theirs, f"{place_of_module}:Cls")
    code, out, err = call(*(each.format(run=theirs) for each in _VERBS[verb]))
    assert not ran.exists()
    assert code in (1, 2)
    assert "from which no code is run" in err + out
    assert "Traceback" not in err


def test_a_captioner_in_a_run_is_not_imported(
    theirs: Path, shapes_catalog: Path, refuse: Refuse
) -> None:
    ran = theirs.parent / "ran"
    (theirs / "evil.py").write_text(_EVIL.format(ran=str(ran)))
    said = refuse("data", "caption", shapes_catalog, "--with", "theirs.evil:Cls")
    assert not ran.exists()
    assert said.startswith("longtake: --with 'theirs.evil:Cls': ")
    assert "from which no code is run" in said


@pytest.mark.parametrize("verb", _VERBS)
def test_code_that_a_foreign_run_names_is_listed_and_not_run(
    verb: str, theirs: Path, call: Call, refuse: Refuse
) -> None:
    ran = theirs.parent / "ran"
    (theirs.parent / "plausible.py").write_text(_EVIL.format(ran=str(ran)))
    _names_module(theirs, "plausible:Cls")
    _begin_elsewhere(theirs, host="elsewhere")
    sys.modules.pop("plausible", None)
    words = [each.format(run=theirs) for each in _VERBS[verb]]
    said = refuse(*words)
    assert not ran.exists()
    assert "was not begun by this user on this host" in said
    assert "trainable.modules.own.module = 'plausible:Cls'" in said
    assert "--trust" in said
    call(*words, "--trust")
    assert ran.exists()


def _begin_elsewhere(run: Path, **began: object) -> None:
    record = json.loads((run / "run.json").read_text())
    record["begun_by"].update(began)
    (run / "run.json").write_text(json.dumps(record))


def test_measures_that_a_mirror_names_are_not_imported(theirs: Path, refuse: Refuse) -> None:
    """Though its run.json says that this user began it here."""
    ran = theirs.parent / "ran"
    (theirs.parent / "plausible_measure.py").write_text(_EVIL.format(ran=str(ran)))
    recipe = theirs / "recipe.toml"
    named = '[evaluation.presets.mine]\nmeasures = ["plausible_measure:Cls"]\n'
    recipe.write_text(recipe.read_text().replace("[evaluation.presets.mine]\n", named))
    (theirs / ".source").mkdir()
    (theirs / ".source" / ".of.json").write_text("{}")
    said = refuse("evaluate", theirs, "--preset", "mine", "--device", "cpu")
    assert not ran.exists()
    assert "evaluation.presets.mine.measures: 'plausible_measure:Cls'" in said


def test_the_hook_of_a_foreign_run_is_not_run(theirs: Path) -> None:
    recipe = theirs / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("[watch]\n", '[watch]\nhook = "touch ran"\n'))
    assert watch_target(theirs, by_hand=True).settings.hook == "touch ran"
    _begin_elsewhere(theirs, uid=os.getuid() + 1)
    assert watch_target(theirs, by_hand=True).settings.hook is None
    assert watch_target(theirs, by_hand=True, trust=True).settings.hook == "touch ran"


@pytest.mark.parametrize("key", ["prompts_file", "conditioning"])
def test_a_foreign_run_names_no_file_of_this_host(key: str, theirs: Path) -> None:
    """Its lines, or its picture, would become a part of the results that others see."""
    secret = theirs.parent / "secret.txt"
    secret.write_text("a password\n")
    (theirs / "inside.txt").write_text("a red square\n")
    (theirs / "link.txt").symlink_to(secret)
    assert find_file(key, secret, theirs) == secret  # of one's own run
    (theirs / "run.json").unlink()
    assert find_file(key, Path("inside.txt"), theirs) == theirs / "inside.txt"
    for file in (secret, Path("../secret.txt"), Path("link.txt")):
        with pytest.raises(RecipeError, match="lies outside of"):
            find_file(key, file, theirs)
    with pytest.raises(RecipeError, match=r"there is no file secret\.txt in"):
        find_file(key, Path("secret.txt"), theirs)  # which lies in the current folder
