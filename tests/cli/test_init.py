"""`longtake init`: each template is a recipe, and refusals name what there is."""

import subprocess
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longtake.cli import init
from longtake.cli.app import app
from longtake.config import Recipe
from longtake.errors import RecipeError
from longtake.process import program

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_CASES = [(each, shape) for each in init.templates() for shape in each.shapes]
_NAMES = [f"{each.family}-{each.task}-{each.size}-{shape.gib}" for each, shape in _CASES]


@pytest.mark.parametrize(("template", "shape"), _CASES, ids=_NAMES)
def test_each_template_is_a_recipe(template: init.Template, shape: init.Shape) -> None:
    memory = f"{shape.gib}GiB"
    text = init.render_recipe(template, memory, Path("my clips"), Path("mine.toml"))
    recipe = Recipe.model_validate(tomllib.loads(text), strict=False)
    bucket = recipe.data.buckets[0]
    assert (bucket.num_frames, bucket.height, bucket.width) == (
        shape.frames,
        shape.height,
        shape.width,
    )
    assert (recipe.model.family, str(recipe.out)) == (template.family, "runs/mine")
    assert str(recipe.data.catalog) == "catalogs/my clips.parquet"
    assert "longtake data index 'my clips' --out 'catalogs/my clips.parquet'" in text
    assert recipe.recompute.memory == (memory if template.pretrained else None)
    assert all(len(line) <= 110 for line in text.splitlines())
    assert not any(line.endswith(" ") for line in text.splitlines())


@pytest.mark.drill
@pytest.mark.parametrize(("template", "shape"), _CASES, ids=_NAMES)
def test_plan_accepts_each_template(
    template: init.Template, shape: init.Shape, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    memory = f"{shape.gib}GiB"
    path.write_text(init.render_recipe(template, memory, Path("clips"), path))
    command = program("longtake", "plan", str(path), "--device", f"{memory},165TFLOPS")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "family", "task", "size", "memory", "data"),
    [
        ("wan_1_3b_lora_24gb", "wan", "lora", "1.3b", "24GiB", "my_clips"),
        ("wan_14b_lora_80gb", "wan", "lora", "14b", "79GiB", "my_clips"),
        ("wan_1_3b_full_80gb", "wan", "full", "1.3b", "79GiB", "my_clips"),
        ("flux_kontext_lora_48gb", "flux_kontext", "lora", "12b", "48GiB", "pairs/after"),
        ("flux_kontext_module_48gb", "flux_kontext", "module", "12b", "48GiB", "pairs/after"),
    ],
)
def test_the_examples_are_what_init_writes(
    name: str, family: str, task: str, size: str, memory: str, data: str
) -> None:
    path = _EXAMPLES / f"{name}.toml"
    template = init.find_template(family, task, size)
    written = init.render_recipe(template, memory, Path(data), Path("examples") / path.name)
    assert path.read_text(encoding="utf-8") == written


def test_the_largest_shape_that_fits_is_chosen() -> None:
    template = init.find_template("wan", "lora", "1.3b")
    assert init.choose_shape(template, None) == template.shapes[-1]
    assert init.choose_shape(template, "15.9GiB") == template.shapes[-2]
    assert init.choose_shape(template, "192GiB") == template.shapes[-1]
    with pytest.raises(RecipeError, match=r"needs 12 GiB for its smallest shape.* is 8GiB"):
        init.choose_shape(template, "8GiB")


def test_strings_of_the_user_stay_strings() -> None:
    """A path with quotes is one string of the recipe and one word of the shell."""
    template = init.find_template("tubelet", None, None)
    odd = Path('a "b" $(c)')
    text = init.render_recipe(template, None, odd, Path("d'e.toml"))
    recipe = tomllib.loads(text)
    assert recipe["data"]["catalog"] == 'catalogs/a "b" $(c).parquet'
    assert recipe["out"] == "runs/d'e"
    assert "longtake data index 'a \"b\" $(c)' --out" in text
    with pytest.raises(RecipeError, match="control characters"):
        init.render_recipe(template, None, Path("a\nb"), Path("d.toml"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family", "wam"], "no template for the family 'wam'; did you mean wan?"),
        (["--family", "wan", "--size", "5b"], "there is: --task lora --size 1.3b, --task lora"),
        (["--family", "wan", "--memory", "24"], "is no amount of memory"),
    ],
)
def test_mistakes_name_what_there_is(arguments: list[str], message: str, tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    result = CliRunner().invoke(app, ["init", *arguments, "--out", str(out)])
    assert isinstance(result.exception, RecipeError)
    assert message in str(result.exception)
    assert not out.exists()


def test_a_recipe_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    arguments = ["init", "--family", "tubelet", "--data", "clips.parquet", "--out", str(out)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    first = out.read_text()
    assert tomllib.loads(first)["data"]["catalog"] == "clips.parquet"
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, RecipeError)
    assert "is not overwritten" in str(again.exception)
    assert out.read_text() == first


def test_without_a_family_the_templates_are_listed() -> None:
    result = CliRunner().invoke(app, ["init"])
    assert result.exit_code == 0
    assert all(each.family in result.output for each in init.templates())
