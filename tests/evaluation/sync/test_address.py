"""What --source names."""

from pathlib import Path

import pytest

from longtake.errors import RunError
from longtake.evaluation.sync.address import parse
from longtake.evaluation.sync.source import open_source


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
    """As rsync takes it; a colon behind a slash belongs to a path."""
    address = parse(text)
    assert (address.host, address.path) == (host, path)


@pytest.mark.parametrize("text", ["", ":/runs", "cluster:", "cluster::runs", "-oProxyCommand=x:/a"])
def test_what_names_no_place_is_refused(text: str) -> None:
    """Nor can a host be an option of ssh."""
    with pytest.raises(RunError, match=r"Expected user@host:/path"):
        parse(text)


def test_what_cannot_be_reached_from_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such protocol, a package that is missing, no rsync: each in one sentence, at once."""
    into = tmp_path / "mirror"
    with pytest.raises(RunError, match=r"nosuch.*cannot be read"):
        open_source("nosuch://runs", into / "0", "vm-1")
    with pytest.raises(RunError, match=r"s3fs"):
        open_source("s3://bucket/runs", into / "1", "vm-1")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunError, match=r"needs rsync, which is not installed here"):
        open_source("cluster:/runs", into / "2", "vm-1")
    open_source("/runs", into / "3", "vm-1").close()  # by fsspec
