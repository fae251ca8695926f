"""What cannot be used ends in one sentence and exit code 2, and nothing is lost."""

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., tuple[int, str, str]]


def _sentence(code: int, err: str) -> str:
    assert code == 2, err
    assert "Traceback" not in err
    assert len(err) < 1000
    return err


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("note.txt", "expected a file name such as name.png"),
        ("", "expected a file name such as name.png"),
        ("note.png", "is there already, and is no .png file"),
        ("folder.png", "is there already, and is no .png file"),
        ("pipe.png", "is there already, and is no .png file"),
        ("x" * 300 + ".png", "cannot be written: File name too long"),
    ],
)
def test_a_picture_is_never_written_over_something_else(
    place: Path, tmp_path: Path, call: Call, name: str, why: str
) -> None:
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    for note in ("note.txt", "note.png"):
        (tmp_path / note).write_text("three days of work")
    out = tmp_path / name if name else ""
    code, _, err = call("show", place / "run", "--out", out)
    assert why in _sentence(code, err)
    assert (tmp_path / "note.png").read_text() == "three days of work"
    assert (tmp_path / "note.txt").read_text() == "three days of work"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["show", "RUN", "--around", "9" * 20], "--around"),
        (["show", "RUN", "--around", "9" * 5000], "--around"),
        (["sample", "RUN", "--prompt", "x", "--out", "o.mp4", "--steps", str(2**63)], "10000"),
        (["sample", "RUN", "--prompt", "x", "--out", "o.mp4", "--guidance", "1e308"], "1000"),
        (["sample", "RUN", "--prompt", "x", "--out", "o.mp4", "--seed", str(2**64)], "--seed"),
        (["sample", "RUN", "--prompt", "\udcff", "--out", "o.mp4"], "not valid UTF-8"),
        (["sample", "RUN", "--prompt", "x", "--out", "/dev/null"], "expected the name of"),
        (["compare", "RUN", "--preset", "quick", "--out", "o.png", "--steps", "9" * 5000], "steps"),
        (["evaluate", "RUN", "--backlog", "every=" + "9" * 5000], "--backlog"),
        (["plan", "RECIPE", "--memory", "9" * 5000 + "GiB"], "no amount of memory"),
        (["preflight", "RECIPE", "--timeout", "inf"], "--timeout"),
        (["data", "prepare", "CATALOG", "--size", "9" * 5000 + "x8", "--out", "o"], "--size"),
        (["data", "prepare", "CATALOG", "--size", "8x8", "--fps", "nan", "--out", "o"], "fps nan"),
    ],
)
def test_absurd_arguments_are_refused(
    place: Path,
    shapes_catalog: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Call,
    arguments: list[str],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"RUN": place / "run", "RECIPE": place / "recipe.toml", "CATALOG": shapes_catalog}
    code, _, err = call(*(names.get(each, each) for each in arguments))
    assert why in "".join(err.split("│")) if code == 2 else code == 2, err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{}", "[" * 100_000, "\0"])
def test_a_damaged_vocabulary_is_named(place: Path, tmp_path: Path, call: Call, text: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(place / "run", run)
    (saved,) = run.rglob("tokenizer.json")
    saved.write_text(text)
    code, _, err = call("sample", run, "--prompt", "x", "--out", tmp_path / "o.mp4")
    assert f"{saved} cannot be read" in _sentence(code, err)


def test_a_full_disk_ends_an_index_in_a_sentence(
    shapes_catalog: Path, tmp_path: Path, call: Call
) -> None:
    out = tmp_path / "catalog.parquet"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        code, _, err = call("data", "index", shapes_catalog.parent, "--out", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "journal.jsonl cannot be written: File too large. Make room" in _sentence(code, err)
    code, _, err = call("data", "index", shapes_catalog.parent, "--out", out)
    assert code == 0
    assert " 0 not read again" not in err


def test_a_run_that_may_not_be_read_is_named(place: Path, another_user: Path, call: Call) -> None:
    run = another_user / "run"
    run.mkdir()
    (run / "recipe.toml").touch()
    run.chmod(0)
    for verb in (["show"], ["data", "audit"], ["evaluate"]):
        code, _, err = call(*verb, run)
        assert str(run) in _sentence(code, err)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("model.config.hidden_size=824633720832", "model.config does not fit the tubelet family"),
        ("model.config.num_blocks=x", "model.config does not fit the tubelet family"),
        ("model.config.patch_size=[0,8,8]", "model.config.patch_size is"),
        ("model.config.patch_size=8", "model.config.patch_size is"),
        ("data.buckets=[{num_frames=65536,height=65536,width=65536}]", ""),
    ],
)
def test_sizes_that_no_memory_holds_are_refused(
    place: Path, tmp_path: Path, call: Call, change: str, why: str
) -> None:
    changes = ("--set", change, "--set", f"out={tmp_path / 'run'}")
    code, _, err = call("train", place / "recipe.toml", *changes)
    assert why in _sentence(code, err)


def test_no_pipe_keeps_an_index_waiting(shapes_catalog: Path, tmp_path: Path, call: Call) -> None:
    clips = tmp_path / "clips"
    clips.mkdir()
    shutil.copy(next(shapes_catalog.parent.rglob("*.mp4")), clips)
    for name in ("x.tar", "x.mp4", "pipe.parquet", "captions.txt"):
        os.mkfifo(clips / name)
    code, _, err = call("data", "index", clips, "--out", clips / "pipe.parquet")
    assert "exists and is not a catalog" in _sentence(code, err)
    out = tmp_path / "catalog.parquet"
    code, _, err = call("data", "index", clips, "--captions", clips / "captions.txt", "--out", out)
    assert "it is a named pipe, expected a regular file" in _sentence(code, err)
    code, _, err = call("data", "index", clips, "--out", out)
    assert code == 0, err
    assert "2 files rejected" in err
