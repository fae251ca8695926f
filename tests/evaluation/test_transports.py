"""Addresses, rules and errors of rsync."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from tests.evaluation.build import write

from longtake.errors import RunError
from longtake.evaluation import mirror
from longtake.evaluation.mirror import open_mirror
from longtake.evaluation.transports import (
    GoneError,
    Rsync,
    Rules,
    is_success,
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
    ],
)
def test_an_address_is_a_host_and_a_path(text: str, host: str, path: str) -> None:
    address = parse_address(text)
    assert (address.host, address.path) == (host, path)


@pytest.mark.parametrize("text", ["", ":/runs", "cluster:", "cluster::runs", "-oProxyCommand=x:/a"])
def test_an_address_without_host_and_path_is_refused(text: str) -> None:
    with pytest.raises(RunError, match=r"Expected user@host:/path"):
        parse_address(text)


@pytest.mark.parametrize("text", ["s3://bucket/runs", "file:///runs", "memory://runs"])
def test_a_url_is_refused_with_rsync_and_a_mount_as_remedies(text: str) -> None:
    with pytest.raises(RunError, match=rf"{text}: URLs are not read.* by rsync.* Mount the store"):
        parse_address(text)


@pytest.mark.parametrize("source", ["cluster:/runs", "/runs"])
def test_a_source_is_refused_where_rsync_is_not_installed(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunError, match=r"needs rsync, which is not installed here\. Install it"):
        open_mirror(source, tmp_path / "mirror", "vm-1")


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


_REMOTE = "[b]"
_COPIED = {
    "markers": {
        "recipe.toml",
        "checkpoints/step_00000001/COMMITTED",
        "[b]/recipe.toml",
        "[b]/checkpoints/step_00000001/COMMITTED",
        "[b]/evaluations/low4s/step_00000001/scores.json",
        "[b]/evaluations/low4s/step_00000002/scores.json",
        "b/recipe.toml",
    },
    "records": {  # step 2 is claimed here; step 1 is another server's result
        "[b]/evaluations/low4s/step_00000001/00_s0.mp4",
        "[b]/evaluations/low4s/superseded/step_00000002-ab/scores.json",
        "[b]/deep/ledger/x.json",
    },
    "checkpoint": set(_FILES) - {"optimizer/x"},
    "heartbeat": {"servers/vm-1/heartbeat.json"},
    "results": {
        name
        for name in _FILES
        if not name.startswith((".hidden", ".source", "claims", "low4s", "checkpoints"))
        and "/.step" not in name
        and not name.startswith("servers/vm-")
    }
    | {"servers/vm-1/events.jsonl"},
    "scores": {"low4s/step_00000001/scores.json"},
}


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_rules_copy_these_files(tree: Path, tmp_path: Path) -> None:
    rules: dict[str, Rules] = {
        "markers": mirror.marker_rules(),
        "records": mirror.record_rules([(_REMOTE, RunDirectory(tree / _REMOTE))]),
        "checkpoint": mirror.CHECKPOINT_RULES,
        "heartbeat": mirror.heartbeat_rules("vm-1"),
        "results": mirror.result_rules(tree),
        "scores": mirror.SCORE_RULES,
    }
    transport = Rsync(parse_address(str(tree)))
    for name, of_name in rules.items():
        transport.fetch("", tmp_path / name, of_name)
        assert _files(tmp_path / name) == _COPIED[name], name


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


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


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_only_records_are_mirrored(tmp_path: Path) -> None:
    """Neither Python, nor libraries, nor anything else that a host could run."""
    names = {"recipe.toml", "run.json", "events.jsonl", "prompts.txt", "pictures/a.png"}
    names |= {"components/vae/config.json", "components/vae/model.safetensors"}
    others = {"evil.py", "package/__init__.py", "native.so", "evil.pth", "a.sh", "weights.bin"}
    for name in names | others:
        write(tmp_path / "runs" / "one" / name, b"content")
    with closing(open_mirror(str(tmp_path / "runs"), tmp_path / "mirror", "vm")) as source:
        source.look()
    assert _files(tmp_path / "mirror" / "one") == names


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_links_here_are_not_sent(tmp_path: Path) -> None:
    write(tmp_path / "secret", b"x")
    write(tmp_path / "results" / "a.json", b"{}")
    (tmp_path / "results" / "b.json").symlink_to(tmp_path / "secret")
    (tmp_path / "runs").mkdir()
    Rsync(parse_address(str(tmp_path / "runs"))).send(tmp_path / "results", "", ())
    assert _files(tmp_path / "runs") == {"a.json"}
