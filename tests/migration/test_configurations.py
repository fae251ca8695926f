"""Configurations of other trainers become recipes: what is set, and what is said.

Each folder of `configs` has the files of one training, as a user of that trainer has them, and
`expected.toml`: the answers that `init` is given, the keys that are named, and the values.
"""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from longtake import config
from longtake.config import Recipe
from longtake.errors import RecipeError
from longtake.migration import write
from longtake.migration.migrate import Migration, migrate
from longtake.migration.settle import Answers

_CONFIGS = Path(__file__).parent / "configs"
_NAMES = sorted(folder.name for folder in _CONFIGS.iterdir())


def _migrate(name: str, **answers: Any) -> Migration:
    files = [file for file in sorted((_CONFIGS / name).iterdir()) if file.name != "expected.toml"]
    return migrate(files, Path("recipes/mine.toml"), Answers(**answers))


def _noted(done: Migration) -> dict[str, list[str]]:
    """The keys that are named under each heading."""
    kinds = {heading: kind for kind, heading in write.HEADINGS.items()}
    noted: dict[str, list[str]] = {}
    for line in done.notes:
        if line in kinds:
            keys = noted.setdefault(kinds[line], [])
        elif kinds and ": " in line:
            keys.append(line.strip().partition(": ")[0])
        else:
            keys += line.strip().split(", ")
    return {kind: sorted(set(keys)) for kind, keys in noted.items() if kind != "kept"}


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe.model_dump(exclude_unset=True, exclude_none=True, mode="json")
    for part in key.split("."):
        value = value[part]
    return value


@pytest.mark.parametrize("name", _NAMES)
def test_a_configuration_becomes_a_recipe(name: str) -> None:
    expected = tomllib.loads((_CONFIGS / name / "expected.toml").read_text(encoding="utf-8"))
    done = _migrate(name, **expected.get("answers", {}))
    assert done.title == expected["title"]
    assert _noted(done) == expected["notes"]
    recipe = config.parse(tomllib.loads(done.text), source=name)
    assert {key: _value(recipe, key) for key in expected["values"]} == expected["values"]
    # What a run keeps of it is the same recipe.
    assert config.parse(tomllib.loads(config.dump(recipe)), source=name) == recipe
    assert done.text.count("# DECIDE: ") == len(expected["notes"].get("decide", []))


def test_no_secret_of_a_configuration_is_written_or_printed() -> None:
    """Neither by a name that says so, nor by a value that looks like one."""
    values = ("not-a-real-key", "hf_abc", "abcdef", "$HF", "hf_yyy")
    for name in ("musubi_wan22_script", "at_flux_person", "dp_wan22_high", "ot_z_image"):
        expected = tomllib.loads((_CONFIGS / name / "expected.toml").read_text(encoding="utf-8"))
        done = _migrate(name, **expected.get("answers", {}))
        written = "\n".join([done.text, *done.notes])
        assert expected["notes"]["secret"]
        assert not any(value in written for value in values)


@pytest.mark.parametrize(
    ("name", "answers", "asked"),
    [
        ("dp_wan22_high", {}, "init RELEASE --from"),
        ("dp_wan22_high", {"release": "Wan-AI/Wan2.2-T2V-A14B-Diffusers"}, "--expert high"),
        ("at_wan22_both", {}, "--expert high"),
        ("at_kontext", {"expert": "high"}, "--expert is for a release with two transformers"),
        ("dp_kontext", {"release": "Qwen/Qwen-Image"}, "Qwen-Image"),
    ],
)
def test_what_no_file_says_is_asked(name: str, answers: dict[str, Any], asked: str) -> None:
    with pytest.raises(RecipeError, match=asked):
        _migrate(name, **answers)


def test_the_number_of_gpus_is_an_answer() -> None:
    """Batches of a configuration are for each GPU; the recipe's are over all of them."""
    training = tomllib.loads(_migrate("at_kontext", gpus=4).text)["training"]
    assert (training["global_batch_size"], training["micro_batch_size"]) == (4, 1)


@pytest.mark.parametrize(
    ("files", "asked"),
    [
        (["dp_kontext/training.toml"], "clips.toml"),
        (["dp_kontext/clips.toml"], "and not how"),
        (["st_klein_lokr/config.json", "st_klein_lokr/clips.json"], "lycoris.json"),
        (["dp_kontext/training.toml", "musubi_flux2/clips.toml"], "several trainers"),
        (["musubi_wan_t2v/prompts.txt"], "no command"),
    ],
)
def test_a_missing_or_foreign_file_is_named(files: list[str], asked: str) -> None:
    with pytest.raises(RecipeError, match=asked):
        migrate([_CONFIGS / file for file in files], Path("mine.toml"), Answers())


def test_a_model_that_is_not_trained_here_is_refused_by_its_name(tmp_path: Path) -> None:
    command = "python flux_train_network.py --model_type=chroma --train_data_dir=/data"
    (tmp_path / "train.sh").write_text(command)
    with pytest.raises(RecipeError, match="sd-scripts's chroma, which longtake does not train"):
        migrate([tmp_path / "train.sh"], Path("mine.toml"), Answers())
