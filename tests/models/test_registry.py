"""What the registry promises: a family by name, and nothing imported before it is asked for."""

import subprocess
import sys

import pytest

from longtake.errors import RecipeError
from longtake.models.base import family
from longtake.models.wan import Wan


def test_a_family_is_found_by_name() -> None:
    """The name is the recipe's `model.family`."""
    assert isinstance(family("wan"), Wan)


@pytest.mark.parametrize(
    ("name", "hint"), [("wann", r"did you mean wan\?"), ("qqq", r"no name is near\.")]
)
def test_an_unknown_family_gets_the_nearest(name: str, hint: str) -> None:
    """And in any case all names there are."""
    with pytest.raises(RecipeError, match=f"{hint} Known: flux, flux_kontext, tubelet, wan"):
        family(name)


def test_importing_the_models_imports_no_heavy_library() -> None:
    """Loading diffusers or transformers takes seconds; a run on pixels and words needs neither."""
    modules = ["base", "wan", "flux", "tubelet", "build", "objective"]
    imports = ", ".join(f"longtake.models.{module}" for module in modules)
    code = f"import sys, {imports}; print({{'diffusers', 'transformers'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
