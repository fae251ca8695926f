"""What is kept in the run directory of a long run."""

import os
from pathlib import Path

from longtake.fsio import write_once
from longtake.node_dir import NodeDirectory, request_path
from longtake.run_dir import RunDirectory
from longtake.watch.pruning import prune_answers, prune_requests

_DAY = 86400.0


def _at(path: Path, moment: float) -> None:
    os.utime(path, (moment, moment))


def test_the_newest_answers_stay(tmp_path: Path) -> None:
    """With what belongs to them; what rank 0 has left there is not a watcher's to take away."""
    node = NodeDirectory(RunDirectory(tmp_path), "gpu1")
    folder = node.dump_path("x").parent
    folder.mkdir(parents=True)
    theirs = {"2026-01-01T00-00-00_worker_7.json", "2026-01-01T00-00-00_worker_7.txt"}
    for name in theirs:
        (folder / name).touch()
        _at(folder / name, 1.0)
    tokens = [f"stall_one_0000000{number}_0" for number in range(3)] + ["asked_1", "asked_2"]
    for number, token in enumerate(tokens):
        node.dump_path(token).touch()
        node.flight_path(token).mkdir()
        (node.flight_path(token) / "rank_0").touch()
        for path in (node.dump_path(token), node.flight_path(token)):
            _at(path, 100.0 + number)
    prune_answers(node, most=3)
    kept = {f"{token}{suffix}" for token in tokens[2:] for suffix in (".json", ".fr")}
    assert {path.name for path in folder.iterdir()} == kept | theirs
    prune_answers(NodeDirectory(RunDirectory(tmp_path), "gpu2"))  # that has no folder


def test_requests_of_days_ago_go(tmp_path: Path) -> None:
    """But for stalls of the launch that runs, whose names are not to be given twice."""
    run = RunDirectory(tmp_path)
    prune_requests(run, "one")  # there is no folder
    for name, launch, days in (
        ("old", "zero", 3.9),
        ("ours", "one", 3.9),
        ("recent", "zero", 5.0),
        ("asked", "", 3.9),
    ):
        stall = {"stall": {"launch": launch}} if launch else {}
        write_once(request_path(run, name), {"token": name, **stall})
        _at(request_path(run, name), days * _DAY)
    prune_requests(run, "one")
    names = {path.stem for path in (tmp_path / "requests").iterdir()}
    assert names == {"recent", "ours"}
