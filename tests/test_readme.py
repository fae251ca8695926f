"""What the README shows is what there is."""

import re
import tomllib
from pathlib import Path

from longtake.config import DataSection, EvaluationSection
from longtake.demo import run

_ROOT = Path(__file__).resolve().parents[1]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")
_SHOWN: list[str] = re.findall(r"```toml\n(.*?)```", _README, re.DOTALL)


def test_the_recipe_shown_is_the_one_that_ships() -> None:
    """A reader who copies the recipe from the README gets the demo's."""
    _, _, shown = _SHOWN
    shipped = Path(run.__file__).with_name("recipe.toml").read_text(encoding="utf-8")
    assert shown == shipped
    assert len(shipped.splitlines()) <= 24
    assert tomllib.loads(shipped)["training"]["steps"] == 1500


def test_the_curriculum_shown_is_one() -> None:
    """With a catalog and a bucket it is a section of a recipe."""
    curriculum, _, _ = _SHOWN
    data = tomllib.loads(curriculum)["data"]
    bucket = {"num_frames": 17, "height": 64, "width": 96}
    section = DataSection.model_validate({**data, "catalog": "c.parquet", "buckets": [bucket]})
    assert [stage.name for stage in section.stages] == ["easy", "all"]


def test_the_evaluation_shown_is_one() -> None:
    """Of a preset that comes along."""
    _, evaluation, _ = _SHOWN
    section = EvaluationSection.model_validate(tomllib.loads(evaluation)["evaluation"])
    assert list(section.presets) == ["low4s"]


def test_every_link_leads_somewhere() -> None:
    """Files that the README links to or draws exist."""
    for target in re.findall(r"\]\(([^)#]+)\)", _README):
        assert (_ROOT / target).exists(), target


def test_the_tree_is_complete() -> None:
    """Every module of the package is named in the captioned tree, and nothing else is."""
    tree = _README[_README.index("src/longtake/\n") : _README.index("tests/    ")]
    modules = {path.name for path in (_ROOT / "src" / "longtake").rglob("*.py")}
    named = set(re.findall(r"\b\w+\.py\b", tree))
    assert named == modules - {"__init__.py", "__main__.py"}
