"""What torch has compiled is kept where the next start finds it."""

import os
from pathlib import Path

import pytest

from longtake.config import TrainingSection
from longtake.training.compile_cache import keep_compiled

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def _section(*, compiles: bool) -> TrainingSection:
    return TrainingSection(steps=1, batch_size=1, compile=compiles)


def test_it_is_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And torch looks there."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.setenv(_VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled(_section(compiles=True))
    assert cache_dir() == str(tmp_path / "longtake" / "compiled")


@pytest.mark.parametrize(("compiles", "before"), [(False, None), (True, "/mine")])
def test_the_environment_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, compiles: bool, before: str | None
) -> None:
    """Where it names a folder, or nothing is compiled."""
    monkeypatch.setenv(_VARIABLE, before or "")
    if before is None:
        monkeypatch.delenv(_VARIABLE)
    keep_compiled(_section(compiles=compiles))
    assert os.environ.get(_VARIABLE) == before
