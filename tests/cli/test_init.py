"""`longtake init`: each template is a recipe, and refusals name what there is."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from longtake.cli import init
from longtake.cli.app import app
from longtake.config import Recipe, load
from longtake.data.encode import write_video
from longtake.errors import LongtakeError, RecipeError
from longtake.process import program
from longtake.trust import import_class

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _init(out: Path, *arguments: str) -> tuple[str, Recipe]:
    """What is printed, and the recipe that is written."""
    done = CliRunner().invoke(app, ["init", *arguments, "--out", str(out)])
    assert done.exit_code == 0, done.exception
    return done.output, Recipe.model_validate(tomllib.loads(out.read_text()), strict=False)


def _refusal(out: Path, *arguments: str) -> str:
    """Why nothing is written."""
    before = out.read_text() if out.exists() else None
    exception = CliRunner().invoke(app, ["init", *arguments, "--out", str(out)]).exception
    assert isinstance(exception, LongtakeError)
    assert (out.read_text() if out.exists() else None) == before
    return str(exception)


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
    """In each phase; with samples while it trains, for which a small GPU may have no room."""
    path = tmp_path / "mine.toml"
    memory = f"{shape.gib}GiB"
    text = init.render_recipe(template, memory, Path("clips"), path)
    for name in ("house.png", "dancer.png", "jump.png"):
        Image.new("RGB", (64, 64)).save(tmp_path / name)
    shutil.copytree(_EXAMPLES, tmp_path / "examples")  # has the module
    path.write_text(re.sub(r"^# (\[eval|prompts|condi)", r"\1", text, flags=re.MULTILINE))
    options = ["--device", f"{memory},165TFLOPS", "--set", "sampling.every=500", "--json"]
    command = ["longtake", "plan", str(path), *options]
    done = subprocess.run(
        program(*command), capture_output=True, text=True, check=False, cwd=tmp_path
    )
    facts = json.loads(done.stdout)
    phases = {each["name"]: each["fits"] for each in facts["phases"]}
    assert facts["short_phases"] == ([] if phases["sampling"] else ["sampling"])
    assert done.returncode == len(facts["short_phases"]), done.stdout + done.stderr
    assert phases.pop("sampling") or shape.gib < init._SMALL_GIB
    assert set(phases.values()) <= {True}, phases


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


@pytest.mark.parametrize(
    ("out", "module"),
    [
        ("mine.toml", "pose_adapter"),
        ("recipes/mine.toml", "recipes.pose_adapter"),
        ("my recipes/mine.toml", "pose_adapter"),
    ],
)
def test_outside_of_a_clone_a_template_brings_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, module: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(out).parent.mkdir(exist_ok=True)
    options = ("--family", "flux_kontext", "--task", "module")
    _init(Path(out), *options)
    named = load(Path(out)).trainable.modules["pose"].module
    assert named == f"{module}:PoseAdapter"
    assert import_class(named, "a test").__name__ == "PoseAdapter"
    path = Path(*module.split(".")).with_suffix(".py")
    assert f'module = "{named}"' in path.read_text()
    path.write_text("mine")
    Path(out).unlink()
    _init(Path(out), *options)
    assert path.read_text() == "mine"


def test_the_largest_shape_that_fits_is_chosen() -> None:
    template = init.find_template("wan", "lora", "1.3b")
    assert init.choose_shape(template, None) == template.shapes[-1]
    assert init.choose_shape(template, "15.9GiB") == template.shapes[-2]
    assert init.choose_shape(template, "192GiB") == template.shapes[-1]
    with pytest.raises(RecipeError, match=r"needs 8 GiB for its smallest shape.* is 6GiB"):
        init.choose_shape(template, "6GiB")


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


def test_a_catalog_has_the_name_of_the_folder_that_was_named(tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(tmp_path)
    template = init.find_template("tubelet", None, None)
    text = init.render_recipe(template, None, tmp_path / "mine" / ".", Path("mine.toml"))
    assert tomllib.loads(text)["data"]["catalog"] == "catalogs/mine.parquet"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family", "wam"], "no template for the family 'wam'; did you mean wan?"),
        (["--family", "hunyuan"], "did you mean hunyuan_video15?"),
        (["--family", "qwen"], "did you mean qwen_image or "),
        (
            ["--family", "flux2"],
            "name one, as in `longtake init black-forest-labs/FLUX.2-klein-base-4B`.",
        ),
        (["--family", "wan", "--size", "5b"], "there is: --task lora --size 1.3b, --task lora"),
        (["--family", "wan", "--memory", "24"], "is not an amount of memory"),
    ],
)
def test_mistakes_name_what_there_is(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert message in _refusal(tmp_path / "mine.toml", *arguments)


def test_a_recipe_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    out, arguments = tmp_path / "mine.toml", ("--family", "tubelet", "--data", "clips.parquet")
    _, recipe = _init(out, *arguments)
    assert str(recipe.data.catalog) == "clips.parquet"
    assert "is not overwritten" in _refusal(out, *arguments)


def test_without_a_family_the_templates_are_listed() -> None:
    result = CliRunner().invoke(app, ["init"])
    assert result.exit_code == 0
    assert all(each.family in result.output for each in init.templates())
    assert "24 to 24" not in result.output
    assert "Qwen/Qwen-Image-Edit-2511" in result.output


def test_the_spellings_of_the_readme_are_understood() -> None:
    assert init.find_template("Wan", "LoRA", "14B") == init.find_template("wan", "lora", "14b")


def test_a_folder_and_a_template_of_wan_train_alike(tmp_path: Path) -> None:
    _, of_release = _init(tmp_path / "mine.toml", _release(tmp_path / "release", _WAN))
    _, of_family = _init(tmp_path / "other.toml", "--family", "wan", "--size", "14b")
    for section in ("trainable", "optimizer", "training", "ema", "checkpoint"):
        release_keys, keys = (
            getattr(recipe, section).model_dump(exclude={"device", "precision"})
            for recipe in (of_release, of_family)
        )
        assert release_keys == keys


def test_buckets_are_added_for_the_clips_that_are_there(tmp_path: Path) -> None:
    clips = tmp_path / "clips"
    clips.mkdir()
    for number in range(3):
        write_video(clips / f"{number}.mp4", np.zeros((40, 64, 32, 3), np.uint8), 16)
    said, recipe = _init(tmp_path / "mine.toml", "--family", "wan", "--data", str(clips))
    assert "do not fit 81 frames of 832x480" in said
    shapes = {(each.num_frames, each.height > each.width) for each in recipe.data.buckets}
    assert shapes == {(81, False), (81, True), (33, False), (33, True)}


def test_a_single_bucket_that_is_added_is_said(tmp_path: Path) -> None:
    clip = tmp_path / "clips" / "short.mp4"
    clip.parent.mkdir()
    write_video(clip, np.zeros((40, 32, 56, 3), np.uint8), 16)
    said, recipe = _init(tmp_path / "mine.toml", "--family", "wan", "--data", str(clip.parent))
    assert len(recipe.data.buckets) == 2
    assert "Buckets for them were added: 33 frames of 832x480." in said


_KONTEXT = {
    "model_index.json": {"_class_name": "FluxKontextPipeline"},
    "transformer/config.json": {
        "_class_name": "FluxTransformer2DModel",
        "in_channels": 64,
        "guidance_embeds": True,
    },
    "scheduler/scheduler_config.json": {"use_dynamic_shifting": True, "max_shift": 2.05},
}
_WAN = {
    "transformer/config.json": {
        "_class_name": "WanTransformer3DModel",
        "in_channels": 16,
        "out_channels": 16,
    },
    "scheduler/scheduler_config.json": {"flow_shift": 3.0, "prediction_type": "flow_prediction"},
}

_WAN_I2V = _WAN | {"transformer/config.json": _WAN["transformer/config.json"] | {"in_channels": 36}}


def _release(folder: Path, files: dict[str, dict[str, object]]) -> str:
    for name, values in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(
    ("files", "task", "said", "expected"),
    [
        (
            _KONTEXT,
            "lora",
            "FLUX.1 Kontext: fine-tuned with LoRA",
            ("flux_kontext", "lora", "bf16", (1, 1024, 1024), None, ["reference"], True),
        ),
        (
            _WAN,
            "full",
            "Wan 2.1, from text to video: all weights fine-tuned",
            ("wan", "full", "fp32", (81, 480, 832), 16.0, [], False),
        ),
        (
            _WAN_I2V,
            "lora",
            "Wan 2.1, from a first frame and text to video: fine-tuned with LoRA",
            ("wan", "lora", "bf16", (81, 480, 832), 16.0, ["first"], False),
        ),
    ],
)
def test_a_release_needs_no_family(
    files: dict[str, dict[str, object]],
    task: str,
    said: str,
    expected: tuple[object, ...],
    tmp_path: Path,
) -> None:
    """Family, conditioning, size, rate and shift follow from its files."""
    release, out = _release(tmp_path / "a release", files), tmp_path / "mine.toml"
    output, recipe = _init(out, release, "--task", task, "--memory", "48GiB")
    assert said in " ".join(output.split())
    text, bucket = out.read_text(), recipe.data.buckets[0]
    assert expected == (
        recipe.model.family,
        recipe.trainable.base(),
        recipe.model.dtype,
        (bucket.num_frames, bucket.height, bucket.width),
        recipe.data.fps,
        list(recipe.data.conditioning),
        recipe.text.pooled is not None,
    )
    assert (recipe.model.pretrained, recipe.flow.shift) == (release, "release")
    assert ("mu 0.5 at 256 and 2.05 at 4096 tokens" in text) == bool(recipe.text.pooled)
    assert not any(line.endswith(" ") for line in text.splitlines())


@pytest.mark.parametrize(
    ("memory", "bucket", "quantize"),
    [("12GiB", (33, 480, 832), "auto"), ("24GiB", (81, 480, 832), "none")],
)
def test_a_small_gpu_gets_a_smaller_shape_and_weights_in_fewer_bits(
    memory: str, bucket: tuple[int, int, int], quantize: str, tmp_path: Path
) -> None:
    """By a release and by a template; the computer's RAM is written as what may be pinned of it."""
    release = _release(tmp_path / "a release", _WAN_I2V)
    for arguments in ([release], ["--family", "wan", "--size", "14b"]):
        out = tmp_path / f"{len(arguments)}.toml"
        options = ["--memory", memory, "--host-memory", "32GiB"]
        _, recipe = _init(out, *arguments, *options)
        (shape,) = recipe.data.buckets
        assert (shape.num_frames, shape.height, shape.width) == bucket
        assert recipe.model.quantize == quantize
        assert recipe.recompute.memory == memory
        assert recipe.recompute.host_memory == "19.2GiB"


def test_a_shipped_release_has_its_template(tmp_path: Path) -> None:
    """Whose shapes were planned; the same text as by its family."""
    out, texts = tmp_path / "mine.toml", []
    for arguments in (["Wan-AI/Wan2.1-T2V-14B-Diffusers"], ["--family", "wan", "--size", "14b"]):
        _init(out, *arguments)
        texts.append(out.read_text())
        out.unlink()
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"_class_name": "TheirTransformer"}, [], "its transformer is TheirTransformer, which no"),
        ({}, [], "transformer/config.json names no class (_class_name). Expected what save_pre"),
        (_WAN["transformer/config.json"], ["--task", "module"], "there are lora and full"),
        (_WAN["transformer/config.json"], ["--size", "5b"], "leave --family and --size out"),
        ({"_class_name": "ZImageTransformer2DModel", "siglip_feat_dim": 8}, [], "is Z-Image Omni"),
    ],
)
def test_a_release_without_a_template_is_refused(
    config: dict[str, object], options: list[str], message: str, tmp_path: Path
) -> None:
    release = _release(tmp_path / "release", {"transformer/config.json": config})
    assert message in _refusal(tmp_path / "mine.toml", release, *options)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {},
            "has no subfolder transformer; it has no subfolders. Expected a release in diffusers'",
        ),
        ({"vae/config.json": {}}, "has no subfolder transformer; it has vae. Expected a release"),
        (
            {"config.json": {"_class_name": "FluxControlNetModel"}},
            "is one part of a release (FluxControlNetModel), and the whole is needed. Name the fo",
        ),
    ],
)
def test_a_folder_that_is_no_release_is_refused(
    files: dict[str, dict[str, object]], message: str, tmp_path: Path
) -> None:
    """Without the repositories that are known, as a folder was named."""
    (tmp_path / "release").mkdir()
    release = _release(tmp_path / "release", files)
    said = _refusal(tmp_path / "mine.toml", release)
    assert f"{release} {message}" in said
    assert "Known without a download" not in said


def test_pictures_that_a_model_may_be_given_are_comments(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    _init(out, _release(tmp_path / "release", _WAN_I2V))
    text = out.read_text()
    assert list(tomllib.loads(text)["data"]["conditioning"]) == ["first"]
    given = tomllib.loads(text.replace("# last = ", "last = "))["data"]["conditioning"]
    assert given["last"] == {"kind": "picture", "frame": "last"}


@pytest.mark.parametrize(
    ("dtype", "quantize"), [(torch.bfloat16, "none"), (torch.float8_e4m3fn, "fp8")]
)
def test_one_file_takes_all_else_from_its_release(
    tmp_path: Path, dtype: torch.dtype, quantize: str
) -> None:
    """The recipe keeps the bits of its weights."""
    release, out = _release(tmp_path / "release", _WAN), tmp_path / "mine.toml"
    file = str(tmp_path / "model.safetensors")
    save_file({"weight": torch.zeros(4, 4).to(dtype), "norm": torch.zeros(4)}, file)
    _, recipe = _init(out, file, "--config-from", release)
    assert (recipe.model.pretrained, recipe.model.config_from) == (file, release)
    assert recipe.model.quantize == quantize
    assert (recipe.codec.pretrained, recipe.text.pretrained) == (release, release)
    missing = _refusal(tmp_path / "other.toml", f"{tmp_path}/no.gguf", "--config-from", release)
    assert "no.gguf cannot be read" in missing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.safetensors"], "Name the release that it was made of"),
        (["a/release", "--config-from", "a/release"], "is for one safetensors or GGUF file"),
        (["--config-from", "a/release"], "name the file"),
        (["model.ckpt"], "can run code that is in it"),
    ],
)
def test_files_without_a_release_or_of_other_kinds_are_refused(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    assert message in _refusal(tmp_path / "mine.toml", *arguments)


def test_a_configuration_of_another_trainer_is_translated(tmp_path: Path) -> None:
    """Its notes are printed; options that its files answer are refused, and no file is lost."""
    folder = Path(__file__).resolve().parents[1] / "migration" / "configs" / "dp_kontext"
    files = [
        part for name in ("training", "clips") for part in ("--from", str(folder / f"{name}.toml"))
    ]
    out = tmp_path / "mine.toml"
    output, recipe = _init(out, *files, "--gpus", "2", "--memory", "24GiB")
    assert "To decide" not in output
    assert "Wrote" in output
    assert "longtake data index /data/kontext/target --out catalogs/target.parquet" in output
    assert (recipe.training.global_batch_size, recipe.recompute.memory) == (2, "24GiB")
    assert "exists and is not overwritten" in _refusal(out, *files)
    assert "--task is not for --from" in _refusal(tmp_path / "other.toml", *files, "--task", "lora")
    assert "--gpus is for --from" in _refusal(tmp_path / "other.toml", "--gpus", "2")
