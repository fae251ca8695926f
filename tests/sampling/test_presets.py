"""What is sampled of each checkpoint, and by which further inputs."""

import errno
import hashlib
import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from tests.data.catalogs import make_catalog
from tests.models.tiny import make_recipe

from longtake import config, fsio
from longtake.config import Bucket, EmaSection, Recipe
from longtake.data.clip import Clip, Media
from longtake.data.encode import write_video
from longtake.data.index import index
from longtake.data.tasks import HERE
from longtake.demo.shapes import held_out_captions
from longtake.errors import DataError, RecipeError, RunError
from longtake.evaluation_dir import EvaluationDirectory
from longtake.fsio import read_json
from longtake.run_dir import RunDirectory
from longtake.sampling.preset_files import (
    kept_picture,
    read_input,
    read_picture,
    refuse_other_inputs,
)
from longtake.sampling.preset_prompts import read_prompts
from longtake.sampling.presets import (
    Preset,
    find_preset,
    keep_preset,
    preset_names,
    settings_for,
    weights_to_sample,
)
from longtake.sampling.sampler import SamplerLoader
from longtake.sampling.videos import check_samples, sample_preset
from longtake.training.train import train

_SHIPPED = ["default", "demo", "high4s", "image1024", "low16s", "low4s"]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return _recipe(tmp_path)


def _recipe(folder: Path, evaluation: str = "", more: str = "") -> Recipe:
    sampling = {"num_inference_steps": 7, "guidance_scale": 3.0, "shift": 2.0, "fps": 8.0}
    sections = tomllib.loads(f"{more}\n{evaluation}")
    recipe = make_recipe("tubelet", (8, 32, 48), sampling=sampling, **sections)
    return recipe.model_copy(update={"out": folder})


def _size(preset: Preset) -> tuple[int, int, int, float]:
    bucket = preset.bucket
    return bucket.num_frames, bucket.height, bucket.width, preset.settings.fps


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("low4s", (65, 480, 832, 16.0)),
        ("high4s", (65, 720, 1280, 16.0)),
        ("low16s", (257, 480, 832, 16.0)),
        ("image1024", (1, 1024, 1024, 1.0)),
        ("demo", (8, 32, 48, 8.0)),
    ],
)
def test_shipped_presets(name: str, size: tuple[int, int, int, float], recipe: Recipe) -> None:
    preset = find_preset(recipe, name)
    assert _size(preset) == size
    assert preset.settings.num_inference_steps == 7
    assert (preset.settings.guidance_scale, preset.settings.shift) == (3.0, 2.0)
    assert (preset.seeds, preset.weights) == ((0,), "ema/main")
    assert len(set(preset.prompts)) == len(preset.prompts) == (8 if name == "demo" else 12)


def test_samples_with_sound_have_the_rate_of_the_training(tmp_path: Path) -> None:
    """Whatever the recipe or a preset says: their sound is as long."""
    table = '[evaluation.presets.mine]\nprompts = ["a"]\nfps = 30'
    more = 'model.audio = "train"\ndata = {fps = 24, frame_stride = 2}'
    recipe = _recipe(tmp_path, table, more)
    found = [find_preset(recipe, name).settings.fps for name in ("low4s", "mine", "demo")]
    assert found == [12, 12, 12]
    out = tmp_path / "a.mp4"
    assert check_samples(recipe, ["a"], [], out, fps=12.0)[2].fps == 12.0
    with pytest.raises(RecipeError, match=r"--fps 30: .* 12 frames a second .* Leave --fps out"):
        check_samples(recipe, ["a"], [], out, fps=30.0)


def test_the_demos_prompts_are_never_trained_on(recipe: Recipe) -> None:
    preset = find_preset(recipe, "demo")
    assert set(preset.prompts) <= set(held_out_captions())
    assert preset.measures == ("longtake.demo.oracle:Adherence",)


def test_images_and_videos_have_prompts_of_their_own(recipe: Recipe) -> None:
    videos, image = find_preset(recipe, "low4s"), find_preset(recipe, "image1024")
    assert not set(videos.prompts) & set(image.prompts)


def test_a_recipe_changes_only_what_it_says(tmp_path: Path) -> None:
    """An empty list switches off what a shipped preset measures."""
    low4s = "[evaluation.presets.low4s]\nnum_frames = 101\n"
    demo = "[evaluation.presets.demo]\nmeasures = []\nbatch_size = 3"
    recipe = _recipe(tmp_path, low4s + demo)
    for each in (recipe, config.parse(tomllib.loads(config.dump(recipe)), source="kept")):
        longer, unmeasured = find_preset(each, "low4s"), find_preset(each, "demo")
        assert _size(longer) == (101, 480, 832, 16.0)
        assert (longer.seeds, longer.measures, longer.batch_size) == ((0,), (), 4)
        assert longer.decoding == "auto"
        assert _size(unmeasured) == (8, 32, 48, 8.0)
        assert (unmeasured.measures, unmeasured.batch_size) == ((), 3)


def test_later_places_win_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "beside.txt").write_text("in the folder\n")
    recipe = _recipe(
        tmp_path,
        '[evaluation.presets.demo]\nprompts_file = "beside.txt"\nseeds = [1, 2]\nbatch_size = 2',
    )
    beside = find_preset(recipe, "demo", tmp_path)
    assert (beside.prompts, beside.seeds, beside.batch_size) == (("in the folder",), (1, 2), 2)
    assert beside.measures == ("longtake.demo.oracle:Adherence",)
    own = tmp_path / "own" / "mine.toml"
    own.parent.mkdir()
    own.write_text("[demo]\nseeds = [0]\nbatch_size = 4\nwidth = 64\n[more]\nheight = 64\n")
    mine = find_preset(recipe, "demo", tmp_path, own)
    assert (mine.prompts, mine.seeds, mine.batch_size) == (("in the folder",), (0,), 4)
    assert mine.bucket.width == 64
    assert find_preset(recipe, "more", tmp_path, own).bucket.height == 64


def test_a_prompts_file_is_looked_for_beside_what_names_it_and_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run that was moved with its prompts finds them."""
    recipe = _recipe(tmp_path, '[evaluation.presets.mine]\nprompts_file = "p.txt"')
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "p.txt").write_text("here\n")
    assert find_preset(recipe, "mine", tmp_path).prompts == ("here",)
    (tmp_path / "p.txt").write_text("beside\n")
    assert find_preset(recipe, "mine", tmp_path).prompts == ("beside",)


@pytest.mark.parametrize(
    ("evaluation", "file", "names", "expected"),
    [
        ("", None, ["low4s", "demo", "low4s"], ["low4s", "demo"]),
        ("", "[b]\n[a]\n", [], ["b", "a"]),
        ('evaluation.run = ["demo"]\n[evaluation.presets.b]', None, [], ["demo"]),
        ("[evaluation.presets.b]\n[evaluation.presets.a]", None, [], ["b", "a"]),
    ],
)
def test_presets_are_those_that_command_file_or_recipe_name(
    evaluation: str, file: str | None, names: list[str], expected: list[str], tmp_path: Path
) -> None:
    own = None
    if file is not None:
        own = tmp_path / "mine.toml"
        own.write_text(file)
    assert preset_names(_recipe(tmp_path, evaluation), names, tmp_path, own) == expected


def test_without_any_wish_captions_are_sampled(tmp_path: Path) -> None:
    held_out = _catalog(tmp_path / "held_out.parquet", range(90, 99))
    recipe = _recipe(tmp_path / "run", f'evaluation.held_out = "{held_out}"')
    run = RunDirectory(tmp_path / "run")
    _catalog(run.catalogs_path / "0a.parquet", range(6))
    preset = find_preset(recipe, "default", run.path)
    assert (preset.name, _size(preset)) == ("default", (8, 32, 48, 8.0))
    numbers = [*range(90, 94), *range(4)]
    assert preset.prompts == tuple(f"clip {number}" for number in numbers)
    keep_preset(EvaluationDirectory(run), preset)
    _catalog(run.catalogs_path / "00.parquet", range(20, 30))
    assert find_preset(recipe, "default", run.path) == preset


def test_without_captions_prompts_come_with_longtake(recipe: Recipe, tmp_path: Path) -> None:
    preset = find_preset(recipe, "default", tmp_path)
    assert (preset.name, len(preset.prompts)) == ("default", 12)


def _clip(number: int) -> Clip:
    return Clip(
        identity=f"{number:032x}",
        media=Media(f"/clips/{number}.mp4"),
        caption=f"clip {number}",
        kind="video",
        num_frames=8,
        height=32,
        width=48,
        fps=8.0,
        duration_seconds=1.0,
        stream_index=0,
        rotation=0,
        codec="h264",
        pix_fmt="yuv420p",
    )


def _catalog(path: Path, numbers: range) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    make_catalog([_clip(number) for number in numbers]).save(path)
    return path


@pytest.mark.parametrize(
    ("table", "more", "message"),
    [
        ("height = 33", "", "mine: 8 frames of 48x33 cannot be written as mp4: .* such as 48x34"),
        ("fps = 0.01", "", "mine: 0.01 frames a second cannot be written"),
        ('prompts = ["a", " "]', "", r"mine: prompts\[1\] are empty"),
        ('prompts = ["a circle --size 64*64"]', "", r"mine: prompts\[0\]: .* has --size"),
        ('prompts = [{prompt = "a", height = 33}]', "", "mine: 8 frames of 48x33 cannot be"),
        (
            'prompts = ["b", {prompt = "a", negative_prompt = "[trigger]"}]',
            "",
            r"mine: Prompt 1, counted from 0: .* data\.trigger",
        ),
        (
            'prompts_file = "none.txt"',
            "",
            r"mine: prompts_file: there is no file none\.txt in .+ or ",
        ),
        ('ema = "wide"', "", r"mine: .* no EMA profile 'wide'\. It keeps: main\."),
        ('ema = "main"', "ema.decay = 0", r"mine: .* no EMA profile 'main'\. It keeps: none\."),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(
    table: str, more: str, message: str, tmp_path: Path
) -> None:
    recipe = _recipe(tmp_path, f"[evaluation.presets.mine]\n{table}", more)
    with pytest.raises(RecipeError, match=message) as caught:
        find_preset(recipe, "mine", tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_are_the_averaged_ones_unless_it_says_none(tmp_path: Path) -> None:
    """`ema = "none"` is the raw weights; a run without averages has no others."""
    raw = _recipe(tmp_path, '[evaluation.presets.mine]\nema = "none"')
    assert find_preset(raw, "mine").weights == "model"
    without = _recipe(tmp_path, "", "ema.decay = 0")
    assert find_preset(without, "demo").weights == "model"


def test_an_unknown_preset_gets_the_nearest_and_all_there_are(recipe: Recipe) -> None:
    """Both, because the nearest may be wrong."""
    with pytest.raises(
        RecipeError, match=r"no preset low4\. Did you mean low4s.* There are: default, demo"
    ):
        find_preset(recipe, "low4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[low4s]\nwidht = 640", r"low4s\.widht is not a key of a preset; did you mean width\?"),
        ("[low4s]\nwidth = -2", r"low4s\.width is -2; it should be greater than 0"),
        ('[a]\nprompts = ["b", {prompt = "c", width = -2}]', r"a\.prompts\.1\.width is -2; it sho"),
        (
            '[a]\nprompts = [{prompt = "c", widht = 2}]',
            r"prompts\.0\.widht is not .*presets\.width",
        ),
        ("[a]\nprompts = [3]", r"a\.prompts\.0 is 3; it should be a text in quotes"),
        ("width = 640", "width stands outside of a preset's table"),
        ("[low4s", "are not valid TOML"),
        ("[Low4s]", r"Low4s.* should"),
    ],
)
def test_a_file_of_presets_that_is_wrong_is_named(
    text: str, message: str, recipe: Recipe, tmp_path: Path
) -> None:
    (tmp_path / "presets.toml").write_text(text)
    with pytest.raises(RecipeError, match=rf"presets\.toml.*{message}"):
        find_preset(recipe, "low4s", tmp_path, tmp_path / "presets.toml")
    with pytest.raises(RecipeError, match=r"gone\.toml cannot be read"):
        find_preset(recipe, "low4s", None, tmp_path / "gone.toml")


def test_requests_go_prompt_by_prompt_and_files_are_named_by_both(recipe: Recipe) -> None:
    preset = replace(find_preset(recipe, "demo"), prompts=("a", "b"), seeds=(0, 7))
    found = [(each.prompt, each.seed) for each in preset.requests()]
    assert found == [("a", 0), ("a", 7), ("b", 0), ("b", 7)]
    names = [each.file for each in preset.requests()]
    assert names == ["00_s0.mp4", "00_s7.mp4", "01_s0.mp4", "01_s7.mp4"]


def test_a_kept_preset_is_never_replaced_by_another(recipe: Recipe, tmp_path: Path) -> None:
    """Memory and measures may change, because the videos do not; prompts and settings may not."""
    directory = EvaluationDirectory(RunDirectory(tmp_path))
    preset = find_preset(recipe, "demo")
    keep_preset(directory, preset)
    record = read_json(directory.preset_path("demo"))
    assert record == preset.as_record()
    assert record["prompts"] == list(preset.prompts)
    keep_preset(directory, replace(preset, batch_size=1, decoding="tiles", measures=()))
    with pytest.raises(RecipeError, match=r"demo holds videos of another one; .* prompts, seeds"):
        keep_preset(directory, replace(preset, prompts=("a",), seeds=(1,)))
    assert read_json(directory.preset_path("demo")) == record


@pytest.mark.parametrize("left", ["", "{", "[]", "null"])
def test_what_a_loss_of_power_has_left_is_no_preset(
    recipe: Recipe, tmp_path: Path, left: str
) -> None:
    directory = EvaluationDirectory(RunDirectory(tmp_path))
    preset = find_preset(recipe, "demo")
    path = directory.preset_path("demo")
    path.parent.mkdir(parents=True)
    path.write_text(left)
    keep_preset(directory, preset)
    assert read_json(path) == preset.as_record()
    assert list(path.parent.iterdir()) == [path]


def test_a_preset_that_is_kept_needs_no_room(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = EvaluationDirectory(RunDirectory(tmp_path))
    preset = find_preset(recipe, "demo")
    keep_preset(directory, preset)

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / ".aside"))

    monkeypatch.setattr(fsio.writing, "_write_durably", full)
    keep_preset(directory, preset)
    with pytest.raises(RecipeError, match="holds videos of another one"):
        keep_preset(directory, replace(preset, seeds=(1,)))
    path = directory.preset_path("new")
    with pytest.raises(RunError, match=f"^{path} cannot be kept: No space left .* Make room.$"):
        keep_preset(directory, replace(preset, name="new"))


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        ("\ufeffa red circle \r\n  ein Fluß\r\nthird", ("a red circle", "ein Fluß", "third")),
        ("one\u2028still one\n", ("one\u2028still one",)),
        ("# first\na red circle - or -- a square\n", ("a red circle - or -- a square",)),
    ],
    ids=["marks of other systems", "another separator of lines", "a remark"],
)
def test_a_prompt_a_line(content: str, prompts: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content.encode())
    assert tuple(each.prompt for each in read_prompts(path)) == prompts


_OWN = '["plain", {prompt = "wide", width = 64, seeds = [3, 4], num_inference_steps = 5}, "last"]'


def test_prompts_can_have_settings_of_their_own(tmp_path: Path) -> None:
    """In a table of the recipe as in a line of a file; others stay as without them."""
    mine = "[evaluation.presets.mine]\nseeds = [1]\nnegative_prompt = 'n'\nprompts"
    lines = [
        '"plain"',
        '{"prompt": "wide", "width": 64, "seeds": [3, 4], "num_inference_steps": 5}',
    ]
    (tmp_path / "p.jsonl").write_text("\n".join([*lines, "# a remark", '{"prompt": "last"}']))
    preset = find_preset(_recipe(tmp_path, f"{mine} = {_OWN}"), "mine")
    assert find_preset(_recipe(tmp_path, f"{mine}_file = 'p.jsonl'"), "mine", tmp_path) == preset
    usual, wide = preset.groups()
    assert [each.file for each in usual.requests] == ["00_s1.mp4", "02_s1.mp4"]
    assert (usual.settings, usual.bucket) == (preset.settings, preset.bucket)
    assert (wide.bucket.width, wide.settings.num_inference_steps) == (64, 5)
    assert wide.settings.negative_prompt == "n"
    names = ["00_s1.mp4", "01_s3.mp4", "01_s4.mp4", "02_s1.mp4"]
    assert [each.file for each in preset.requests()] == names
    assert {each.prompt: each.own for each in preset.requests()} == {
        "plain": {},
        "wide": {"width": 64, "num_inference_steps": 5},
        "last": {},
    }
    record = preset.as_record()
    assert record["prompt_settings"] == {
        "1": {"width": 64, "num_inference_steps": 5, "seeds": [3, 4]}
    }
    assert record["prompts"] == ["plain", "wide", "last"]


def test_a_prompt_can_go_without_its_presets_negative_prompt(tmp_path: Path) -> None:
    text = "[evaluation.presets.mine]\nnegative_prompt = 'n'\n"
    table = 'prompts = [{prompt = "a", negative_prompt = ""}]'
    (group,) = find_preset(_recipe(tmp_path, text + table), "mine").groups()
    assert group.settings.negative_prompt == ""
    assert group.requests[0].own == {"negative_prompt": ""}


def test_when_presets_are_sampled_may_change_under_the_same_name(tmp_path: Path) -> None:
    """And nothing of prompts without settings of their own stands in the record."""
    record = find_preset(_recipe(tmp_path), "demo").as_record()
    sampled = config.changed(
        _recipe(tmp_path), ["sampling.every_epochs=2", "sampling.at_start=true"]
    )
    assert find_preset(sampled, "demo").as_record() == record
    assert "prompt_settings" not in record


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a red circle", r"line 2 is a red circle, and no prompt in JSON"),
        ("{}", r"line 2 is \{\}, and no prompt in JSON"),
        ('{"prompt": " "}', "line 2 is .*, and no prompt in JSON"),
        (r'"half a pair \ud83d"', "line 2 is .*, and no prompt in JSON"),
        ("[" * 100_000, r"line 2 is \[+\.\.\., and no prompt in JSON"),
        (
            '{"prompt": "a", "widht": 3}',
            r"line 2: widht is not a key of a prompt; did you mean wid",
        ),
        ('{"prompt": "a", "width": "3"}', r"line 2: width is '3'; it should be a valid integer"),
        ('{"prompt": "a --w 64"}', r"line 2: 'a --w 64' has --w\."),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'"first"\n{line}\n')
    with pytest.raises(RecipeError, match=message):
        read_prompts(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"prompts\.txt is empty"),
        (b"\n \n", r"prompts\.txt is empty"),
        (b"one\n\ntwo\n  \n", r"lines 2, 4 are empty"),
        (b"one\n\n", r"line 2 is empty"),
        (b"\none\n", r"line 1 is empty"),
        (b"one\n" + b"\n" * 30 + b"two", r"lines 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, \.\.\. are"),
        (b"one\ncaf\xe9 noir\n", r"is not UTF-8: line 2 has the byte 0xe9"),
        (b"\xef\xbb\xbfone\ntwo\nthr\xffee\n", r"is not UTF-8: line 3 has the byte 0xff"),
        (b"# first\na circle --w 64 --h 32 --n blurred\n", r"line 2: .* has --w, --h, --n\."),
    ],
)
def test_a_file_that_cannot_be_used_names_its_lines(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        read_prompts(path)


def test_a_trigger_word_is_put_into_prompts_and_negative_prompts(tmp_path: Path) -> None:
    text = '[evaluation.presets.mine]\nprompts = ["a [trigger] dog", "a dog"]\n'
    recipe = _recipe(tmp_path, text)
    with pytest.raises(RecipeError, match=r"data\.trigger"):
        find_preset(recipe, "mine")
    with pytest.raises(RecipeError, match=r"data\.trigger"):
        settings_for(recipe, negative_prompt="no [trigger]")
    named = config.changed(recipe, ['data.trigger="sks"', 'sampling.negative_prompt="a [trigger]"'])
    assert find_preset(named, "mine").prompts == ("a sks dog", "a dog")
    assert settings_for(named)[0].negative_prompt == "a sks"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"none\.txt cannot be read: No such file"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(RecipeError, match="cannot be read: Is a directory"):
        read_prompts(tmp_path)


@pytest.mark.parametrize(
    ("ema", "asked", "weights"),
    [
        ({}, {}, "ema/main"),
        ({}, {"ema": True, "profile": "main"}, "ema/main"),
        ({}, {"ema": False}, "model"),
        ({}, {"ema": False, "profile": "none"}, "model"),
        ({"profiles": [{"name": "a", "decay": 0.9}, {"name": "b", "sigma_rel": 0.1}]}, {}, "ema/a"),
        ({"decay": 0.0}, {}, "model"),
        ({"decay": 0.0}, {"ema": False}, "model"),
    ],
)
def test_which_weights_are_sampled(
    ema: dict[str, Any], asked: dict[str, Any], weights: str, recipe: Recipe
) -> None:
    changed = recipe.model_copy(update={"ema": EmaSection(**ema)})
    assert weights_to_sample(changed, **asked) == weights


@pytest.mark.parametrize(
    ("ema", "asked", "message"),
    [
        ({}, {"profile": "wide"}, r"no EMA profile 'wide'\. It keeps: main\."),
        ({"decay": 0.0}, {"profile": "main"}, r"no EMA profile 'main'\. It keeps: none\."),
        ({"decay": 0.0}, {"ema": True}, r"keeps no averages .* Leave --ema out"),
        ({}, {"ema": True, "profile": "none"}, "--profile none asks for the weights themselves"),
        ({}, {"ema": False, "profile": "main"}, r"--profile main .* but --no-ema asks"),
    ],
)
def test_averages_that_the_run_does_not_keep_are_refused(
    ema: dict[str, Any], asked: dict[str, Any], message: str, recipe: Recipe
) -> None:
    changed = recipe.model_copy(update={"ema": EmaSection(**ema)})
    with pytest.raises(RecipeError, match=message):
        weights_to_sample(changed, **asked)


def test_settings_are_the_recipes_unless_given(recipe: Recipe) -> None:
    settings, bucket = settings_for(recipe)
    assert settings == recipe.sampling
    assert bucket == recipe.data.buckets[0]
    settings, bucket = settings_for(recipe, width=64, shift=None, solver="heun")
    assert settings == recipe.sampling.model_copy(update={"solver": "heun"})
    assert (bucket.num_frames, bucket.height, bucket.width) == (8, 32, 64)
    with pytest.raises(RecipeError, match=r"sampling\.guidance_scale is nan; it should be a fin"):
        settings_for(recipe, guidance_scale=float("nan"))
    with pytest.raises(RecipeError, match=r"data\.buckets\.0\.height is -1; it should be greater"):
        settings_for(recipe, height=-1)


_ONE = 'conditioning.reference = ["a.png"]'


def _kontext(folder: Path, table: str, names: str = "reference") -> Recipe:
    pattern = {"kind": "picture", "path": "../before/{stem}.png"}
    prompts = 'prompts = ["make it snow", "as a drawing"]'
    recipe = make_recipe(
        "flux_kontext",
        (1, 16, 24),
        data={"conditioning": dict.fromkeys(names.split(), pattern)},
        **tomllib.loads(f"[evaluation.presets.kontext]\n{prompts}\n{table}"),
    )
    return recipe.model_copy(update={"out": folder})


def _write_picture(path: Path, colour: str, size: tuple[int, int] = (24, 16)) -> Path:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def test_each_prompt_has_its_own_picture_or_all_have_one(tmp_path: Path) -> None:
    a, b, c = (_write_picture(tmp_path / f"{name}.png", name) for name in ("red", "green", "blue"))
    table = """
    seeds = [0, 7]
    conditioning.pose = ["blue.png"]
    conditioning.reference = ["red.png", "green.png"]
    """
    preset = find_preset(_kontext(tmp_path, table, "reference pose"), "kontext", tmp_path)
    pictures = [dict(each.conditioning) for each in preset.requests()]
    assert pictures == [{"reference": a, "pose": c}] * 2 + [{"reference": b, "pose": c}] * 2
    assert list(pictures[0]) == ["reference", "pose"]


def test_a_run_keeps_what_its_recipe_says_of_pictures(tmp_path: Path) -> None:
    recipe = _kontext(tmp_path, _ONE)
    assert config.parse(tomllib.loads(config.dump(recipe)), source="kept") == recipe


def test_pictures_are_looked_for_beside_what_names_them_and_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, here = tmp_path / "own", tmp_path / "here"
    on_path = _write_picture(here / "a.png", "red")
    monkeypatch.chdir(here)
    recipe = _kontext(tmp_path, "seeds = [3]")
    own.mkdir()
    (own / "mine.toml").write_text(f"[kontext]\n{_ONE}\n")

    def found() -> Path:
        preset = find_preset(recipe, "kontext", tmp_path, own / "mine.toml")
        assert preset.seeds == (3,)
        return preset.requests()[1].conditioning["reference"]

    assert found() == on_path
    _write_picture(tmp_path / "a.png", "blue")  # beside the recipe, which does not name it
    assert found() == on_path
    assert found() != _write_picture(own / "a.png", "green")  # found before it was there
    assert found() == own / "a.png"


def test_a_preset_is_known_by_what_its_pictures_show(tmp_path: Path) -> None:
    a = _write_picture(tmp_path / "a.png", "red")
    preset = find_preset(_kontext(tmp_path, _ONE), "kontext", tmp_path)
    content = hashlib.sha256(a.read_bytes()).hexdigest()[:16]
    assert preset.as_record()["conditioning"] == {"reference": [content] * 2}
    (tmp_path / "moved").mkdir()
    a.rename(tmp_path / "moved" / "b.png")
    moved = _kontext(tmp_path, 'conditioning.reference = ["moved/b.png"]')
    assert find_preset(moved, "kontext", tmp_path).as_record() == preset.as_record()
    none = find_preset(_kontext(tmp_path, "", ""), "kontext")
    assert "conditioning" not in none.as_record()


def test_other_pictures_make_another_preset(tmp_path: Path) -> None:
    directory = EvaluationDirectory(RunDirectory(tmp_path / "run"))
    a = _write_picture(tmp_path / "a.png", "red", (96, 16))
    preset = find_preset(_kontext(tmp_path, _ONE), "kontext", tmp_path)
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
    _write_picture(a, "blue")
    with pytest.raises(
        RecipeError, match=r"holds videos of another one; .* differ in conditioning\."
    ):
        keep_preset(directory, find_preset(_kontext(tmp_path, _ONE), "kontext", tmp_path))
    assert read_json(path) == preset.as_record()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", r': .* none, but .* such as conditioning\.reference = \["reference\.p'),
        ("conditioning = {}", r": .* gives none, but .*\. Give each of them, and no other"),
        ('conditioning.pose = ["a.png"]', r": .* gives pose, .* takes the inputs reference\."),
        (
            'conditioning.reference = ["a.png", "a.png", "a.png"]',
            ": .*3 files, but .* 2 prompts. N",
        ),
        ('conditioning.reference = ["val/gone.png"]', r": .* file val/gone\.png in .+ or in .+\."),
        ('conditioning.reference = ["/gone/a.png"]', r": .*there is no file /gone/a\.png\.$"),
        ('conditioning.reference = ["a.png", "text.png"]', r": .*text\.png cannot be read: "),
        ("conditioning.reference = []", r"\.conditioning\.reference is \[\]; .* have at least 1"),
        (
            'conditioning.reference = "a.png"',
            r"\.conditioning\.reference is 'a\.png'; it should be a li",
        ),
        ('conditioning = ["a.png"]', r"\.conditioning is .*; it should be a table of keys"),
    ],
)
def test_pictures_that_cannot_be_are_said_in_one_sentence(
    table: str, message: str, tmp_path: Path
) -> None:
    """What is no table of files is refused with the recipe."""
    _write_picture(tmp_path / "a.png", "red")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(RecipeError, match=f"kontext{message}") as caught:
        find_preset(_kontext(tmp_path, table), "kontext", tmp_path)
    assert "\n" not in str(caught.value)


def test_the_default_preset_has_inputs_of_clips_and_a_loss_mask_is_none(tmp_path: Path) -> None:
    """The run was trained on one clip, whose camera is a column of the catalog."""
    rows = [[0.5, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
    camera = {"kind": "numbers", "column": "camera", "width": 3, "per_frame": True}
    depth, mask = {"kind": "video", "column": "depth"}, {"kind": "mask", "column": "depth"}
    conditioning = {"depth": depth, "camera": camera, "face": mask}
    data = {"frame_stride": 2, "conditioning": conditioning}
    recipe = make_recipe("tubelet", (2, 16, 24), data=data, flow={"loss_mask": "face"})
    recipe = recipe.model_copy(update={"out": tmp_path / "run"})
    clips, catalogs = tmp_path / "clips", RunDirectory(recipe.out).catalogs_path
    clips.mkdir()
    catalogs.mkdir(parents=True)
    write_video(clips / "a.mp4", np.full((4, 16, 24, 3), 90, np.uint8), fps=8)
    lines = clips / "clips.jsonl"
    line = {"video": "a.mp4", "caption": "a pan", "depth": "a.mp4", "camera": rows}
    lines.write_text(json.dumps(line))
    names = ("depth", "camera")
    index([lines], captions=None, out=catalogs / "0.parquet", work=HERE, conditioning=names)
    preset = find_preset(recipe, "default", recipe.out)
    (request,) = preset.requests()
    assert request.prompt == "a pan"
    assert list(request.conditioning) == ["depth", "camera"]
    assert request.conditioning["depth"] == tmp_path / "clips" / "a.mp4"
    assert json.loads(request.conditioning["camera"].read_text()) == rows
    inputs = recipe.model_inputs()
    read = {
        name: read_input(inputs[name], file, bucket=preset.bucket, stride=2)
        for name, file in request.conditioning.items()
    }
    np.testing.assert_array_equal(read["camera"], [rows[0], rows[2]])
    assert read["depth"].shape == (3, 2, 16, 24)
    keep_preset(EvaluationDirectory(RunDirectory(recipe.out)), preset)
    kept = EvaluationDirectory(RunDirectory(recipe.out)).preset_path("default").parent
    assert [each.name for each in (kept / "pictures").iterdir()] == ["00_depth.png"]
    assert find_preset(recipe, "default", recipe.out) == preset
    own = "{prompts=['a', {prompt='b', num_frames=3}], conditioning={depth=['clips/a.mp4']}}"
    two = "{depth={kind='video',column='depth'}, face={kind='mask',column='depth'}}"
    changes = [f"evaluation.presets.own={own}", f"data.conditioning={two}"]
    longer = config.changed(recipe, changes)
    with pytest.raises(RecipeError, match="ends before frame 4"):
        find_preset(longer, "own", tmp_path)


_BUCKET = Bucket(num_frames=1, height=16, width=24)


def test_a_picture_of_another_size_is_scaled_to_cover_and_cropped(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    border = np.zeros((16, 4, 3), np.uint8)
    Image.fromarray(np.concatenate([border, pixels, border], axis=1)).save(tmp_path / "wide.png")
    assert np.array_equal(read_picture(tmp_path / "wide.png", _BUCKET), pixels)


@pytest.mark.parametrize(
    ("given", "names", "message"),
    [
        ([], ["reference"], r"none, but this model takes the inputs reference\. Give exactly"),
        (["pose"], ["reference"], "pose, but this model takes the inputs reference"),
        (["reference"], [], "reference, but this model takes no further inputs"),
    ],
)
def test_other_inputs_than_those_of_the_recipe_are_refused(
    given: list[str], names: list[str], message: str
) -> None:
    with pytest.raises(DataError, match=f"--conditioning gives {message}"):
        refuse_other_inputs(given, names)
    with pytest.raises(RecipeError, match="conditioning gives " + message.split(r"\.")[0]):
        refuse_other_inputs(given, names, of_preset=True)


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
        _write_picture(run.path / "val" / f"{name}.png", colour, (96, 64))
    presets = run.path / "presets.toml"
    presets.write_text(
        '[kontext]\nprompts = ["move it", "move it"]\n'
        'conditioning.reference = ["val/red.png", "val/blue.png"]\n'
        'conditioning.pose = ["val/pose.png"]\n'
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
    _write_picture(run.path / "val" / "blue.png", "green", (96, 64))
    with pytest.raises(RunError, match=r"val/blue\.png has changed since the preset was read"):
        next(sample_preset(sampler, preset, tmp_path))
    (run.path / "val" / "blue.png").unlink()
    with pytest.raises(RunError, match=r"val/blue\.png cannot be read any more: No such file"):
        next(sample_preset(sampler, preset, tmp_path))
