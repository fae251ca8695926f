"""docs/reference is what its generator writes."""

import runpy
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "reference" / "generate.py"
_PAGES = runpy.run_path(str(_SCRIPT))["PAGES"]


@pytest.mark.parametrize("name", _PAGES)
def test_the_reference_is_up_to_date(name: str) -> None:
    written = (_SCRIPT.parent / name).read_text(encoding="utf-8")
    assert written == _PAGES[name](), "run `make reference`"
