"""Presets of models that go by pictures: which they are, and what is said of wrong ones."""

import hashlib
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from longtake import config
from longtake.config import Bucket, Recipe
from longtake.errors import DataError, RecipeError, RunError
from longtake.evaluation_dir import EvaluationDirectory
from longtake.fsio import read_json
from longtake.run_dir import RunDirectory
from longtake.sampling.presets import (
    Preset,
    find_preset,
    keep_preset,
    kept_picture,
    read_picture,
    read_pictures,
)
from longtake.sampling.sampler import SamplerLoader
from longtake.sampling.videos import sample_preset
from longtake.training.train import train

_ONE = 'references.reference = ["a.png"]'
_PATTERN = '"../before/{stem}.png"'


def _recipe(folder: Path, table: str, names: str = "reference") -> Recipe:
    patterns = ", ".join(f"{name} = {_PATTERN}" for name in names.split())
    text = f"""
    out = "{folder}"
    data.catalog = "clips.parquet"
    data.buckets = [{{ num_frames = 1, height = 16, width = 24 }}]
    data.references = {{ {patterns} }}
    model.family = "flux_kontext"
    training = {{ steps = 4, global_batch_size = 1 }}
    [evaluation.presets.kontext]
    prompts = ["make it snow", "as a drawing"]
    {table}
    """
    return config.parse(tomllib.loads(text), source="test")


def _picture(path: Path, colour: str, size: tuple[int, int] = (24, 16)) -> Path:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _files(preset: Preset) -> list[tuple[str, int, dict[str, Path]]]:
    return [(each.prompt, each.seed, dict(each.references)) for each in preset.requests()]


def test_each_prompt_has_its_own_picture_or_all_have_one(tmp_path: Path) -> None:
    a, b, c = (_picture(tmp_path / f"{name}.png", name) for name in ("red", "green", "blue"))
    table = """
    seeds = [0, 7]
    references.pose = ["blue.png"]
    references.reference = ["red.png", "green.png"]
    """
    preset = find_preset(_recipe(tmp_path, table, "reference pose"), "kontext", tmp_path)
    snow, drawing = {"reference": a, "pose": c}, {"reference": b, "pose": c}
    prompts = ("make it snow", "as a drawing")
    assert _files(preset) == [
        (prompts[0], 0, snow),
        (prompts[0], 7, snow),
        (prompts[1], 0, drawing),
        (prompts[1], 7, drawing),
    ]
    assert list(preset.requests()[0].references) == ["reference", "pose"]


def test_a_run_keeps_what_its_recipe_says_of_pictures(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, _ONE)
    assert config.parse(tomllib.loads(config.dump(recipe)), source="kept") == recipe


def test_pictures_are_looked_for_beside_what_names_them_and_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, here = tmp_path / "own", tmp_path / "here"
    on_path = _picture(here / "a.png", "red")
    monkeypatch.chdir(here)
    recipe = _recipe(tmp_path, "seeds = [3]")
    own.mkdir()
    (own / "mine.toml").write_text(f"[kontext]\n{_ONE}\n")

    def found() -> Path:
        preset = find_preset(recipe, "kontext", tmp_path, own / "mine.toml")
        assert preset.seeds == (3,)
        return preset.requests()[1].references["reference"]

    assert found() == on_path
    _picture(tmp_path / "a.png", "blue")  # beside the recipe, which does not name it
    assert found() == on_path
    assert found() != _picture(own / "a.png", "green")  # found before it was there
    assert found() == own / "a.png"


def test_a_preset_is_known_by_what_its_pictures_show(tmp_path: Path) -> None:
    a = _picture(tmp_path / "a.png", "red")
    preset = find_preset(_recipe(tmp_path, _ONE), "kontext", tmp_path)
    assert preset.as_record()["references"] == {"reference": [_content(a)] * 2}
    (tmp_path / "moved").mkdir()
    a.rename(tmp_path / "moved" / "b.png")
    moved = _recipe(tmp_path, 'references.reference = ["moved/b.png"]')
    assert find_preset(moved, "kontext", tmp_path).as_record() == preset.as_record()
    none = find_preset(_recipe(tmp_path, "", ""), "kontext")
    assert "references" not in none.as_record()


def test_other_pictures_make_another_preset(tmp_path: Path) -> None:
    directory = EvaluationDirectory(RunDirectory(tmp_path / "run"))
    a = _picture(tmp_path / "a.png", "red", (96, 16))
    preset = find_preset(_recipe(tmp_path, _ONE), "kontext", tmp_path)
    keep_preset(directory, preset)
    path = directory.preset_path("kontext")
    kept = [kept_picture(path, number, "reference") for number in (0, 1)]
    assert sorted(path.parent.glob("pictures/*")) == kept
    with Image.open(kept[0]) as copy:
        assert (copy.size, copy.getpixel((3, 3))) == ((24, 16), (255, 0, 0))
    kept[1].unlink()
    before = kept[0].stat().st_mtime_ns
    keep_preset(directory, preset)
    assert (kept[1].exists(), kept[0].stat().st_mtime_ns) == (True, before)
    _picture(a, "blue")
    with pytest.raises(
        RecipeError, match=r"holds videos of another one; .* differ in references\."
    ):
        keep_preset(directory, find_preset(_recipe(tmp_path, _ONE), "kontext", tmp_path))
    assert read_json(path) == preset.as_record()


_GOES_BY = r"kontext: this model goes by pictures: reference; references gives"


@pytest.mark.parametrize(
    ("table", "names", "message"),
    [
        ("", "reference", rf'{_GOES_BY} none\. .* such as references\.reference = \["reference\.p'),
        ("references = {}", "reference", rf"{_GOES_BY} none\. Give each of them, and no other"),
        ('references.pose = ["a.png"]', "reference", rf"{_GOES_BY} pose\."),
        (_ONE, "", r"kontext: references gives pictures \(reference\), but .* goes by none"),
        (
            'references.reference = ["a.png", "a.png", "a.png"]',
            "reference",
            r"kontext: references\.reference names 3 files, but there are 2 prompts\. Name one for",
        ),
        (
            'references.reference = ["val/gone.png"]',
            "reference",
            r"kontext: references\.reference: there is no file val/gone\.png in .+ or in .+\. Put",
        ),
        (
            'references.reference = ["/gone/a.png"]',
            "reference",
            r"kontext: references\.reference: there is no file /gone/a\.png\.$",
        ),
        (
            'references.reference = ["a.png", "text.png"]',
            "reference",
            r"kontext: The picture .*text\.png cannot be read: ",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(
    table: str, names: str, message: str, tmp_path: Path
) -> None:
    _picture(tmp_path / "a.png", "red")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(RecipeError, match=message) as caught:
        find_preset(_recipe(tmp_path, table, names), "kontext", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("references.reference = []", r"references\.reference is \[\]; it should have at least 1"),
        (
            'references.reference = "a.png"',
            r"references\.reference is 'a\.png'; it should be a list",
        ),
        ('references = ["a.png"]', r"references is .*; it should be a table of keys and values"),
    ],
)
def test_what_is_no_table_of_files_is_refused_with_the_recipe(
    table: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        _recipe(tmp_path, table)


_BUCKET = Bucket(num_frames=1, height=16, width=24)


def test_a_picture_of_another_size_is_scaled_to_cover_and_cropped(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    border = np.zeros((16, 4, 3), np.uint8)
    Image.fromarray(np.concatenate([border, pixels, border], axis=1)).save(tmp_path / "wide.png")
    assert np.array_equal(read_picture(tmp_path / "wide.png", _BUCKET), pixels)


@pytest.mark.parametrize(
    ("given", "names", "message"),
    [
        ([], ["reference"], r"takes the reference images reference; given: none\. Give exactly"),
        (["pose"], ["reference"], r"takes the reference images reference; given: pose\."),
        (["reference"], [], "takes no reference images, but reference was given"),
    ],
)
def test_other_pictures_than_those_of_the_recipe_are_refused(
    given: list[str], names: list[str], message: str, tmp_path: Path
) -> None:
    picture = _picture(tmp_path / "one.png", "red")
    with pytest.raises(DataError, match=message):
        read_pictures([dict.fromkeys(given, picture)], names, _BUCKET)


def test_a_picture_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_text("no picture")
    for name in ("broken.png", "gone.png"):
        with pytest.raises(DataError, match=rf"The picture .*{name} cannot be read: "):
            read_picture(tmp_path / name, _BUCKET)


def test_a_model_with_an_added_module_is_sampled_by_its_pictures(
    tiny_flux: Callable[..., Any], tmp_path: Path
) -> None:
    alone = ("watch.enabled=false", "tracking.tensorboard=false")
    recipe = tiny_flux("training.steps=1", "sampling.num_inference_steps=2", *alone)
    train(recipe, Console(quiet=True))
    run = RunDirectory(recipe.out)
    for name, colour in (("red", "red"), ("blue", "blue"), ("pose", "white")):
        _picture(run.path / "val" / f"{name}.png", colour, (96, 64))
    presets = run.path / "presets.toml"
    presets.write_text(
        '[kontext]\nprompts = ["move it", "move it"]\n'
        'references.reference = ["val/red.png", "val/blue.png"]\n'
        'references.pose = ["val/pose.png"]\n'
    )
    loader = SamplerLoader(run, "cpu")
    preset = find_preset(loader.recipe, "kontext", run.path, presets)
    loader.check(preset)
    sampler = loader.load(run.checkpoint_path(1), preset.weights)
    first, second = sample_preset(sampler, preset, tmp_path)
    assert np.abs(first.video.astype(int) - second.video.astype(int)).mean() > 0.1
    with Image.open(tmp_path / "sheet.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB")).reshape(-1, 3)
    for drawn, rows in (((255, 0, 0), 1), ((0, 0, 255), 1), ((255, 255, 255), 2)):
        assert (pixels == drawn).all(axis=1).sum() >= rows * 128**2
    _picture(run.path / "val" / "blue.png", "green", (96, 64))
    with pytest.raises(RunError, match=r"val/blue\.png has changed since the preset was read"):
        next(sample_preset(sampler, preset, tmp_path))
    (run.path / "val" / "blue.png").unlink()
    with pytest.raises(RunError, match=r"val/blue\.png cannot be read any more: No such file"):
        next(sample_preset(sampler, preset, tmp_path))
