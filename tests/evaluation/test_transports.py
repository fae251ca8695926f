"""Addresses, rules and errors of rsync and fsspec."""

import os
import shutil
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from longtake.errors import RunError
from longtake.evaluation import mirror
from longtake.evaluation.mirror import RemoteRun, open_mirror
from longtake.evaluation.transports import (
    FsspecTransport,
    GoneError,
    Rules,
    is_success,
    names_in,
    parse_address,
    rsync_error,
)
from longtake.run_dir import RunDirectory


@pytest.mark.parametrize(
    ("text", "host", "path"),
    [
        ("me@cluster:/runs/a/", "me@cluster", "/runs/a"),
        ("cluster:/", "cluster", "/"),
        ("cluster:runs", "cluster", "runs"),
        ("me@[fe80::1]:/runs", "me@[fe80::1]", "/runs"),
        ("/mnt/runs/a:b", "", "/mnt/runs/a:b"),
        ("s3://bucket/runs/", "", "s3://bucket/runs"),
    ],
)
def test_an_address_is_a_host_and_a_path(text: str, host: str, path: str) -> None:
    address = parse_address(text)
    assert (address.host, address.path) == (host, path)


@pytest.mark.parametrize("text", ["", ":/runs", "cluster:", "cluster::runs", "-oProxyCommand=x:/a"])
def test_what_names_no_place_is_refused(text: str) -> None:
    with pytest.raises(RunError, match=r"Expected user@host:/path"):
        parse_address(text)


def test_what_cannot_be_reached_from_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = tmp_path / "mirror"
    with pytest.raises(RunError, match=r"nosuch.*cannot be read"):
        open_mirror("nosuch://runs", into / "0", "vm-1")
    with pytest.raises(RunError, match=r"adlfs"):
        open_mirror("abfs://bucket/runs", into / "1", "vm-1")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunError, match=r"needs rsync, which is not installed here"):
        open_mirror("cluster:/runs", into / "2", "vm-1")
    open_mirror("/runs", into / "3", "vm-1").close()  # by fsspec


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
    for name in _FILES:
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "tree"


def all_rules(tree: Path) -> dict[str, Rules]:
    run = RunDirectory(tree / "[b]")
    remote = RemoteRun("[b]", run, run)
    return {
        "signs": mirror.marker_rules(),
        "records of one": mirror.record_rules([("", RunDirectory(tree))]),
        "records of runs": mirror.record_rules([(remote.name, remote.mirror)]),
        "checkpoint": mirror.CHECKPOINT_RULES,
        "heartbeat": mirror.heartbeat_rules("vm-1"),
        "results": mirror.result_rules(tree),
        "scores": mirror.SCORE_RULES,
    }


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_rsync_takes_the_rules_as_we_do(tree: Path, tmp_path: Path) -> None:
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


_CUT_OFF = """
rsync: connection unexpectedly closed (0 bytes received so far) [Receiver]
rsync error: error in rsync protocol data stream (code 12) at io.c(232) [Receiver=3.2.7]
"""


@pytest.mark.parametrize(
    ("status", "said", "words"),
    [
        (12, "Host key verification failed." + _CUT_OFF, "does not know its host key"),
        (12, "me@c: Permission denied (publickey)." + _CUT_OFF, "without a password"),
        (12, "ssh: Could not resolve hostname c: x" + _CUT_OFF, "no such host"),
        (12, "ssh: connect to host c port 22: No route to host" + _CUT_OFF, "No route to host"),
        (12, "bash: line 1: rsync: command not found" + _CUT_OFF, "not installed there"),
        (12, _CUT_OFF, "cannot be reached"),
        (30, "rsync error: timeout in data send/receive (code 30) at io.c(204)", "cannot be"),
        (
            11,
            'rsync: [receiver] write failed on "/m/x": No space left on device (28)\n'
            "rsync error: error in file IO (code 11) at receiver.c(401) [receiver=3.2.7]\n"
            "rsync: [sender] write error: Broken pipe (32)\n",
            'a disk is full (rsync: [receiver] write failed on "/m/x"',
        ),
        (
            23,
            'rsync: [sender] send_files failed to open "/r/x": Permission denied (13)\n'
            "rsync error: some files/attrs were not transferred (code 23)\n",
            "may not be read or written",
        ),
        (255, "", "status 255"),
    ],
)
def test_the_cause_is_told_and_not_its_consequences(status: int, said: str, words: str) -> None:
    told = str(rsync_error(parse_address("me@c:/runs"), status, said))
    assert words in told
    assert told.startswith("me@c:/runs: ")
    assert "\n" not in told
    assert "Broken pipe" not in told


def test_what_is_not_there_is_another_matter() -> None:
    said = 'rsync: [sender] change_dir "/r" failed: No such file or directory (2)\nrsync error: x\n'
    assert isinstance(rsync_error(parse_address("me@c:/runs"), 23, said), GoneError)
    mixed = said + 'rsync: [sender] opendir "/r/x" failed: Input/output error (5)\n'
    assert not isinstance(rsync_error(parse_address("me@c:/runs"), 23, mixed), GoneError)


def test_a_link_that_leads_nowhere_stops_nothing() -> None:
    said = 'symlink has no referent: "/r/latest"\nrsync error: some files (code 23)\n'
    assert is_success(23, said)
    assert is_success(24, "file has vanished: x\n")
    assert not is_success(23, said + "rsync: [sender] opendir failed: Input/output error (5)\n")
    assert not is_success(23, "")


@pytest.fixture
def store() -> Any:
    store = fsspec.filesystem("memory")
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]


def _put(store: Any, key: str) -> None:
    store.store[key] = MemoryFile(store, key, b"content")


@pytest.mark.parametrize("last", ["..", ".", "a\0b"])
def test_a_key_that_is_no_file_name_is_refused(store: Any, tmp_path: Path, last: str) -> None:
    _put(store, "/runs/good.json")
    listed = store.ls

    def ls(path: str, **options: Any) -> Any:
        return [*listed(path, **options), {"name": f"/runs/{last}", "type": "file", "size": 7}]

    carrier = FsspecTransport(parse_address("memory://runs"))
    carrier._store.ls = ls
    try:
        with pytest.raises(RunError, match="no name of a file that can be mirrored"):
            carrier.fetch("", tmp_path / "mirror", ())
    finally:
        carrier._store.ls = listed
    assert list(tmp_path.rglob("*")) == [tmp_path / "mirror"]


def test_only_records_are_mirrored(store: Any, tmp_path: Path) -> None:
    """Neither Python, nor libraries, nor anything else that a host could run."""
    names = {"recipe.toml", "run.json", "events.jsonl", "prompts.txt", "pictures/a.png"}
    names |= {"components/vae/config.json", "components/vae/model.safetensors"}
    others = {"evil.py", "package/__init__.py", "native.so", "evil.pth", "a.sh", "weights.bin"}
    for name in names | others:
        _put(store, f"/runs/one/{name}")
    with closing(open_mirror("memory://runs", tmp_path / "mirror", "vm")) as source:
        source.look()
    found = (path for path in (tmp_path / "mirror" / "one").rglob("*") if path.is_file())
    assert {str(path.relative_to(tmp_path / "mirror" / "one")) for path in found} == names


def test_links_here_are_not_sent(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text("{}")
    (tmp_path / "results" / "b.json").symlink_to(tmp_path / "secret")
    assert list(names_in(tmp_path / "results", ())) == ["a.json"]
