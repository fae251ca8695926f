"""A source of runs that means harm: what it brings stays in the mirror, and is no code."""

from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from longtake.errors import RunError
from longtake.evaluation.sync.address import parse
from longtake.evaluation.sync.by_fsspec import Filesystem, names_in
from longtake.evaluation.sync.source import open_source


@pytest.fixture
def store() -> Any:
    """A store of objects, whose keys may be anything."""
    store = fsspec.filesystem("memory")
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]


def _put(store: Any, key: str) -> None:
    store.store[key] = MemoryFile(store, key, b"content")


@pytest.mark.parametrize("last", ["..", ".", "a\0b"])
def test_a_key_that_is_no_file_name_is_refused(store: Any, tmp_path: Path, last: str) -> None:
    """It would be written outside of the mirror."""
    _put(store, "/runs/good.json")
    listed = store.ls

    def ls(path: str, **options: Any) -> Any:
        return [*listed(path, **options), {"name": f"/runs/{last}", "type": "file", "size": 7}]

    carrier = Filesystem(parse("memory://runs"))
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
    with open_source("memory://runs", tmp_path / "mirror", "vm") as source:
        source.look()
    found = (path for path in (tmp_path / "mirror" / "one").rglob("*") if path.is_file())
    assert {str(path.relative_to(tmp_path / "mirror" / "one")) for path in found} == names


def test_links_here_are_not_sent(tmp_path: Path) -> None:
    """One among results would bring any file of this host to the source."""
    (tmp_path / "secret").write_text("x")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text("{}")
    (tmp_path / "results" / "b.json").symlink_to(tmp_path / "secret")
    assert list(names_in(tmp_path / "results", ())) == ["a.json"]
