"""Fixtures that more than one room's tests need."""

from pathlib import Path

import pytest

_MATERIAL = Path(__file__).resolve().parents[2] / "shared" / "material"


@pytest.fixture(scope="session")
def material() -> Path:
    """The folder of real clips, damaged clips and exact numbers; skips where it is not at hand."""
    if not (_MATERIAL / "MATERIAL.md").is_file():
        pytest.skip(f"real material is not at hand (looked for {_MATERIAL})")
    return _MATERIAL
