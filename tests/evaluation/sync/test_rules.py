"""Which files are meant: rsync and we agree."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from longtake.evaluation.sync import selection
from longtake.evaluation.sync.by_fsspec import names_in
from longtake.evaluation.sync.remote import RemoteRun
from longtake.evaluation.sync.rules import Rules
from longtake.run_dir import RunDirectory

_FILES = [
    "recipe.toml",
    "checkpoints/step_00000001/COMMITTED",
    "checkpoints/step_00000001/model/.metadata",
    "checkpoints/step_00000001/optimizer/x",
    "optimizer/x",
    "a/optimizer/x",
    "[b]/recipe.toml",
    "[b]/checkpoints/step_00000001/COMMITTED",
    "[b]/checkpoints/.step_00000002/COMMITTED",
    "[b]/evaluations/low4s/step_00000001/scores.json",
    "[b]/evaluations/low4s/step_00000001/00_s0.mp4",
    "[b]/evaluations/low4s/step_00000002/scores.json",
    "[b]/evaluations/low4s/superseded/step_00000002-ab/scores.json",
    "[b]/evaluations/claims/low4s/step_00000002-ab/0.json",
    "[b]/evaluations/servers/vm-1/events.jsonl",
    "[b]/ledger/x",
    "[b]/deep/ledger/x.json",
    "b/recipe.toml",
    ".source/recipe.toml",
    "servers/vm-1/heartbeat.json",
    "servers/vm-1/events.jsonl",
    "servers/vm-2/heartbeat.json",
    "low4s/step_00000001/scores.json",
    "low4s/step_00000003/00_s0.mp4",
    "claims/low4s/step_00000001-ab/0.json",
    ".hidden/x",
    "low4s/.step_00000001.partial/x",
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder of all sorts of files."""
    for name in _FILES:
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "tree"


def all_rules(tree: Path) -> dict[str, Rules]:
    """Each that is used."""
    run = RunDirectory(tree / "[b]")
    remote = RemoteRun("[b]", run, run)
    return {
        "signs": selection.signs(),
        "records of one": selection.records([("", RunDirectory(tree))]),
        "records of runs": selection.records([(remote.name, remote.mirror)]),
        "checkpoint": selection.CHECKPOINT,
        "heartbeat": selection.heartbeat("vm-1"),
        "results": selection.results(tree),
        "scores": selection.scores(),
    }


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_rsync_takes_the_rules_as_we_do(tree: Path, tmp_path: Path) -> None:
    """Of a tree with hidden files, wildcards in names and the same names at several depths."""
    for name, rules in all_rules(tree).items():
        into = tmp_path / name
        command = ["rsync", "-r", "--exclude-from=-", f"{tree}/", f"{into}/"]
        subprocess.run(command, input="\n".join(rules), text=True, check=True)
        copied = [
            os.path.relpath(Path(folder) / file, into)
            for folder, _, files in os.walk(into)
            for file in files
        ]
        assert sorted(copied) == sorted(names_in(tree, rules)), name


def test_of_a_run_neither_leases_nor_what_this_mirror_makes_is_pulled(tree: Path) -> None:
    """Step 2 is claimed here; step 1 is somebody else's result."""
    found = set(names_in(tree, all_rules(tree)["records of runs"]))
    assert found == {
        "[b]/evaluations/low4s/step_00000001/00_s0.mp4",
        "[b]/evaluations/low4s/superseded/step_00000002-ab/scores.json",
        "[b]/deep/ledger/x.json",
    }
