"""What several tests of models need around them."""

from pathlib import Path

import huggingface_hub
import pytest


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A hub that refuses every connection; gives the empty folder that is its cache."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository's root, from where recipes name the modules of `examples/`."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
