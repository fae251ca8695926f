"""Files that are no configuration, or a harmful one, are refused in one sentence."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from longtake.errors import RecipeError
from longtake.migration import convert, reading
from longtake.migration.migrate import migrate
from longtake.migration.settle import Answers

_LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
_TRAINING = 'output_dir = "o"\ndataset = "d"\nepochs = 3\n[model]\ntype = "flux"\n'
_CLIPS = 'resolutions = [512]\n[[directory]]\npath = "/data"\n'
_FLUX = Answers(release="black-forest-labs/FLUX.1-dev", gpus=1)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("references.yaml", _LAUGHS, "references"),
        ("deep.yaml", "[" * 5000, "cannot be read|nested"),
        ("deep.json", "[" * 100_000, "nested"),
        ("deep_enough.json", "[" * 60 + "]" * 60, "levels deep"),
        ("deep.toml", "a = " + "[" * 5000, "cannot be read|nested"),
        ("long.json", json.dumps(list(range(30_000))), "more than 20,000 values"),
        ("huge.toml", "# " + "x" * reading.MAX_BYTES, "more than"),
        ("grown.sh", f"A={'x' * 2**14}\n{'$A' * 20} musubi_train.py", "more than 256 KiB"),
        ("object.yaml", "!!python/object/apply:os.system [id]", "could not determine"),
        ("digits.json", "9" * 5000, "digits"),
        ("binary.toml", b"\xff\xfe\x00\x01", "not UTF-8"),
        ("nothing.toml", "", "no configuration that is known"),
        ("number.json", "3", "no configuration that is known"),
        ("weights.safetensors", "{}", r"ends in \.safetensors"),
        ("command.sh", "rm -rf /", "no command"),
        ("odd.yaml", "config: {process: [{datasets: 3, sample: 4}]}", "nothing of the clips"),
        ("odd.toml", "general = 3\n[[datasets]]\nvideo_directory = 1\n", "not of the kinds"),
        ("odd.json", '{"model_family": [], "data_backend_config": {}}', "nothing of the clips"),
    ],
)
def test_a_harmful_or_foreign_file_is_refused(
    tmp_path: Path, name: str, content: str | bytes, reason: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RecipeError, match=reason) as refused:
        migrate([path], tmp_path / "mine.toml", Answers())
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    "make",
    [lambda path: path.symlink_to("there.toml"), lambda path: path.mkdir(), lambda path: None],
)
def test_only_a_regular_file_is_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "there.toml").write_text(_TRAINING)
    make(tmp_path / "mine.toml")
    with pytest.raises(RecipeError, match=r"mine\.toml"):
        reading.read_config(tmp_path / "mine.toml")


def _write(folder: Path, training: str, clips: str = _CLIPS) -> list[Path]:
    (folder / "training.toml").write_text(training)
    (folder / "clips.toml").write_text(clips)
    return [folder / "training.toml", folder / "clips.toml"]


def test_values_that_make_no_sense_are_named_and_not_written(tmp_path: Path) -> None:
    """Of a known key by its name here, of another kind by its name there."""
    files = _write(tmp_path, "warmup_steps = [{}]\nsave_every_n_steps = 'often'\n" + _TRAINING)
    with pytest.raises(RecipeError, match=r"optimizer\.warmup_steps"):
        migrate(files, tmp_path / "mine.toml", _FLUX)
    files = _write(tmp_path, "save_every_n_steps = 'often'\ngradient_clipping = []\n" + _TRAINING)
    notes = "\n".join(migrate(files, tmp_path / "mine.toml", _FLUX).notes)
    assert "save_every_n_steps: Its value often is not understood." in notes
    assert "gradient_clipping: Its value [] is not understood." in notes


def test_nothing_of_a_file_is_printed_or_written_unescaped(tmp_path: Path) -> None:
    """Names of settings, values and paths of folders may hold escape sequences and line breaks."""
    training = '"\\u001b[31mred" = 1\nlr_scheduler = "\\u001b]0;x\\u0007"\n' + _TRAINING
    clips = _CLIPS.replace("/data", "/data\\\\\\u001b[2J\\nout = 1 # \\u007f")
    done = migrate(_write(tmp_path, training, clips), tmp_path / "mine.toml", _FLUX)
    for text in (done.text, *done.notes, *done.commands):
        assert not {"\x1b", "\x07", "\x7f"} & set(text)
    assert all("\n" not in line for line in (*done.notes, *done.commands))
    assert done.text.count("\nout = ") == 1


def test_a_command_is_split_and_not_run() -> None:
    lines = [
        "DIR=/models; NAME=mine",
        "rm -rf $DIR",
        "OTHER=$(id)",
        "python x/train.py --a $DIR/w --b ${NAME} --c $OTHER --flag --list 1 2e-3 --e=f # --g",
    ]
    (words,) = reading.command_words(lines, ["train.py"])
    assert reading.arguments_of(words) == {
        "a": "/models/w",
        "b": "mine",
        "c": "$OTHER",
        "flag": True,
        "list": [1, 0.002],
        "e": "f",
    }


def test_an_error_shows_no_line_of_a_file(tmp_path: Path) -> None:
    """The line of a mistake may be that of a token."""
    (tmp_path / "job.yaml").write_text("config:\n  hf_token: hf_abcdefghijklmnopqrst: oops\n")
    with pytest.raises(RecipeError, match=r"not allowed here \(line 2, column 36\)") as refused:
        reading.read_config(tmp_path / "job.yaml")
    assert "hf_abc" not in str(refused.value)


def test_a_secret_is_known_in_a_list_and_looked_for_once() -> None:
    """A pattern with two ways through each colon took a second for 7,000 of them."""
    began = time.process_time()
    assert not convert._SECRET_VALUE.search("://" + ":" * 200_000)
    assert time.process_time() - began < 5
    assert convert._SECRET_VALUE.search("https://me@here.org:word@host")


@pytest.mark.parametrize(
    ("process", "said"),
    [
        ({"sample": {"samples": [{1: "x", "prompt": "y"}]}}, "1"),
        ({"model": {"arch": "flux", "name_or_path": "~nobody/x"}}, ""),
        ({"hooks": ["hf_abcdefghijklmnopqrst"]}, "Not read, as it may be a secret"),
    ],
)
def test_odd_names_are_no_crash(tmp_path: Path, process: dict[str, Any], said: str) -> None:
    datasets = [{"folder_path": "/d", "resolution": 512}]
    process = {"datasets": datasets, "model": {"arch": "flux"}, **process}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"config": {"process": [process]}}))
    done = migrate([tmp_path / "job.yaml"], tmp_path / "mine.toml", _FLUX)
    assert said in "\n".join(done.notes)


@pytest.mark.parametrize("size", [0, "auto"])
def test_a_context_of_no_gpus_is_not_understood(tmp_path: Path, size: object) -> None:
    (tmp_path / "c.json").write_text(
        json.dumps({"model_family": "flux", "resolution": 512, "context_parallel_size": size})
    )
    (tmp_path / "d.json").write_text(json.dumps([{"id": "a", "instance_data_dir": "/d"}]))
    done = migrate([tmp_path / "c.json", tmp_path / "d.json"], tmp_path / "mine.toml", _FLUX)
    assert f"context_parallel_size: Its value {size} is not understood." in "\n".join(done.notes)
