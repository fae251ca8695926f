"""What files say never reaches a terminal, or a shell, as anything but text."""

import shlex
import shutil
from io import StringIO
from pathlib import Path

import pytest
from rich.table import Table
from tests.cli.conftest import Call

from longtake.cli.say import SafeConsole
from longtake.data.catalog import Catalog
from longtake.formatting import printable
from longtake.monitor.sentences import doing, spelled

_HOSTILE = "a\x1b]0;owned\x07\nforged line\x9b31m\u202egnp"


def test_a_console_prints_no_escapes_of_others() -> None:
    out = StringIO()
    console = SafeConsole(file=out, force_terminal=True, width=200)
    table = Table("name")
    table.add_row("x\x1b]0;owned\x07")
    console.print(table)
    console.print("[bold]y\x1b[2J[/bold]")
    assert "\x1b]" not in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()
    assert r"x\x1b]0" in out.getvalue()
    assert "\x1b[1m" in out.getvalue()


@pytest.mark.parametrize("name", [f"{_HOSTILE}.mp4", f"bad-{_HOSTILE}.mp4"])
def test_a_hostile_name_is_one_line(
    name: str, shapes_catalog: Path, tmp_path: Path, call: Call
) -> None:
    clips = tmp_path / "clips"
    clips.mkdir()
    good = Path(next(Catalog.load(shapes_catalog).clips()).path)
    shutil.copy(good, clips / "one.mp4")
    if name.startswith("bad"):
        (clips / name).write_text("no video")
    else:
        shutil.copy(good, clips / name)
        (clips / name).with_suffix(".txt").write_text(_HOSTILE)
    out = tmp_path / "catalog.parquet"
    said = [*call("data", "index", clips, "--out", out, "--workers", 1), *call("data", "show", out)]
    text = "".join(each for each in said if isinstance(each, str))
    assert (said[0], said[3]) == (0, 0)
    assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in text)
    assert "\x9b" not in text
    assert "\u202e" not in text
    assert not any(line.startswith("forged line") for line in text.splitlines())


def test_stacks_spell_what_processes_are_called() -> None:
    call = {"function": _HOSTILE, "file": f"/tmp/{_HOSTILE}.py", "line": 3}  # noqa: S108
    heart = {
        "phase": "decode",
        "seconds": 1.0,
        "step": 1,
        "role": "decode",
        "path_of_clip": f"/c/{_HOSTILE}",
    }
    for text in (spelled(call), doing([{"heartbeat": heart, "command": _HOSTILE, **heart}])):
        assert printable(text) == text


def test_suggested_commands_can_be_pasted(place: Path, tmp_path: Path, call: Call) -> None:
    run = tmp_path / "$(touch owned) it's"
    shutil.copytree(place / "run", run)
    code, out, err = call("show", run)
    assert code == 0
    commands = [line.strip() for line in (out + err).splitlines() if "$(touch" in line][1:]
    commands = [line for line in commands if " show " in line or " train " in line]
    assert commands
    for line in commands:
        assert any("$(touch owned) it's" in word for word in shlex.split(line))
