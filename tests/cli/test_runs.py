"""The verbs that read a run: `show` and `stacks`, and one message for each mistake."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.build import wait_until_still
from tests.cli.conftest import Call, CallJson, Refuse

from longtake.heartbeat import heartbeat_dir

_RANKS_DO = ("waits", "sleeps", "waits")
_BEATING = Path(__file__).parents[1] / "monitor" / "beating.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[int]]]:
    """A run of three ranks, of which one hangs, and a decoding process, and their process ids."""
    run = tmp_path_factory.mktemp("stacks") / "run"
    run.mkdir()
    (run / "recipe.toml").touch()
    command = [sys.executable, "-P", str(_BEATING), str(heartbeat_dir(run))]
    roles = [("rank", f"{rank}", "abcdefgh", then) for rank, then in enumerate(_RANKS_DO)]
    started = [
        subprocess.Popen([*command, *role], stdout=subprocess.PIPE)
        for role in (*roles, ("decode", "1", "", "sleeps"))
    ]
    for process in started:
        assert process.stdout
        assert process.stdout.readline() == b"beating\n"
        wait_until_still(process.pid)
    yield run, [process.pid for process in started]
    for process in started:
        process.kill()
        process.communicate()
    shutil.rmtree(heartbeat_dir(run), ignore_errors=True)


def test_identical_stacks_are_one_branch(run: tuple[Path, list[int]], call: Call) -> None:
    path, pids = run
    code, out, err = call("stacks", path)
    host = socket.gethostname()
    assert (code, err) == (0, "")
    lines = [line.strip(" │├└─") for line in out.splitlines()]
    assert lines[0] == f"{path}: 4 processes on {host}"
    assert lines[1].startswith("3 ranks, all in main (")
    assert lines[2].startswith(f"ranks 0, 2 (on {host})  in a collective for ")
    assert lines[2].endswith(" s, step 11  not moving, not computing")
    assert lines[3] == "all_reduce (torch/distributed/distributed_c10d.py:2)"
    at = next(number for number, line in enumerate(lines) if line.startswith("rank 1 "))
    assert lines[at].startswith(f"rank 1 (process {pids[1]} on {host})  in forward for ")
    assert re.fullmatch(r"sleeps \(\S*beating\.py:\d+\)", lines[at + 1])
    [worker] = [line for line in lines if line.startswith("of rank 1 ")]
    assert "decoding /data/bad.mp4 for " in worker


def test_a_stopped_one_stands_out(run: tuple[Path, list[int]], call: Call) -> None:
    path, pids = run
    os.kill(pids[2], signal.SIGSTOP)
    try:
        code, out, _ = call("stacks", path)
    finally:
        os.kill(pids[2], signal.SIGCONT)
    assert code == 0
    [stopped] = [line for line in out.splitlines() if "stopped by a signal" in line]
    assert f"rank 2 (process {pids[2]} " in stopped


def test_the_same_as_json(run: tuple[Path, list[int]], call_json: CallJson) -> None:
    path, pids = run
    facts = call_json("stacks", path, "--native")
    assert (facts["of"], facts["launch"], facts["silent"]) == (str(path), "abcdefgh", [])
    first = facts["groups"][0]
    assert [each["pid"] for each in first["members"]] == [pids[0], pids[2]]
    functions = [call["function"] for call in first["stack"]]
    assert functions == ["all_reduce", "<module>", "waits", "main", "<module>"]
    assert first["native"][0]["function"] == "clock_nanosleep"
    assert {each["method"] for each in first["members"]} == {"py-spy --native"}


def test_a_process_by_its_number(run: tuple[Path, list[int]], call: Call) -> None:
    _, pids = run
    code, out, _ = call("stacks", "--pid", pids[1])
    assert code == 0
    assert out.startswith(f"process {pids[1]}: 1 process on {socket.gethostname()}\n")
    assert "in forward for" in out
    assert "sleeps (" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Name a run directory, or a process with --pid: one of the two."),
        (("nowhere", "--pid", "1"), "one of the two"),
        (("nowhere",), "nowhere is not a run directory: it has no recipe.toml"),
        (("--pid", "4194305"), "There is no process 4194305 on this node"),
    ],
)
def test_a_mistake_is_one_message(refuse: Refuse, arguments: tuple[str, ...], message: str) -> None:
    said = refuse("stacks", *arguments)
    assert message in said
    assert said.count("\n") == 1


def test_a_run_is_shown(place: Path, call: Call, call_json: CallJson) -> None:
    code, out, err = call("show", place / "run")
    assert (code, err) == (0, "")
    assert out.startswith(f"{place}/run: tubelet, step 2 of 2, finished")
    facts = call_json("show", place / "run")
    assert (facts["steps"], facts["state"], facts["rollbacks"]) == (2, "finished", [])
    assert [each["step"] for each in facts["checkpoints"]] == [2]
    (speed,) = facts["speeds"]
    assert f"{speed['bucket']}  " in out
    assert re.search(rf"\b2 +{speed['step_seconds']:.3g} +{speed['median']:,.0f}\b", out)
    assert facts["next"][0]["command"].startswith(f"longtake sample {place}/run")


def test_the_steps_around_one_are_shown(place: Path, call: Call, call_json: CallJson) -> None:
    code, out, err = call("show", place / "run", "--around", "2", "--span", "1")
    assert (code, err) == (0, "")
    assert "The clips of step 2, batch 1, by the ledger" in out
    facts = call_json("show", place / "run", "--around", "2")
    assert [row["step"] for row in facts["rows"]] == [1, 2]
    assert facts["report"] is None
    assert all(Path(each["path"]).is_file() for each in facts["clips"]["samples"])
    assert len(facts["clips"]["samples"]) == 4


@pytest.mark.parametrize("around", [(), ("--around", "1")])
def test_a_page_of_curves_is_written(
    place: Path, tmp_path: Path, call: Call, call_json: CallJson, around: tuple[str, ...]
) -> None:
    out = tmp_path / "curves.html"
    code, _, err = call("show", place / "run", *around, "--out", out)
    assert (code, err) == (0, f"wrote {out}\n")
    steps = json.loads(re.findall(r'id="series">(.*?)</script>', out.read_text())[0])["x"]
    assert steps == [1, 2]
    assert call_json("show", place / "run", *around, "--out", out)["page"] == str(out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("empty",), "is not a run directory"),
        (("nowhere",), "is not a run directory"),
        (("run", "--around", "3"), "has done 2 steps so far, and nothing is known of step 3"),
        (("run", "--out", "/nowhere/x.html"), "/nowhere/x.html cannot be written"),
    ],
)
def test_bad_input_is_one_message(
    place: Path, refuse: Refuse, arguments: tuple[str, ...], message: str
) -> None:
    assert message in refuse("show", place / arguments[0], *arguments[1:])


def test_a_bundle_is_listed_and_only_written_when_asked(
    place: Path, tmp_path: Path, call: Call, call_json: CallJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    out = tmp_path / "help.tar.gz"
    code, _, err = call("bundle", place / "run", "--out", out)
    assert (code, out.exists()) == (2, False)
    assert "bytes  run/recipe.toml" in err
    assert "was not written. Add --yes" in err
    told = call_json("bundle", place / "run", "--out", out, "--yes", says_more=True)
    assert told["bytes"] == out.stat().st_size
    for arguments, why in (
        ((place / "run", "--out", out, "--yes"), "is there already. It was not overwritten"),
        ((place / "run", "--out", tmp_path / "x.zip", "--yes"), "expected a file name such as"),
        ((place / "empty",), "is not a run directory: it has none of recipe.toml"),
        ((place / "file",), "is not a run directory: it has none of recipe.toml"),
    ):
        code, _, err = call("bundle", *arguments)
        assert code == 2
        assert why in err
