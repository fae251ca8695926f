"""What a studio keeps from one checkpoint to the next, and what it refuses."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from longtake import config
from longtake.errors import CheckpointError, RecipeError
from longtake.evaluation.presets import Preset, find_preset
from longtake.evaluation.sampling.studio import Sampler, Studio, load_sampler
from longtake.run_dir import RunDirectory


@pytest.fixture(scope="module")
def studio(tiny_run: Path) -> Studio:
    """Of the tiny run; every test leaves it usable."""
    return Studio(RunDirectory(tiny_run), "cpu")


def _preset(studio: Studio, **changes: Any) -> Preset:
    found = find_preset(studio.recipe, "demo")
    return Preset(**{**vars(found), "prompts": found.prompts[:1], **changes})


def _video(sampler: Sampler, preset: Preset) -> NDArray[np.uint8]:
    return sampler.sample(preset.requests(), preset.settings, preset.bucket)


def _changed(run: Path, copy: Path, change: str) -> Studio:
    """A studio of the same run, if its recipe had been another."""
    recipe = config.changed(RunDirectory(run).recipe(), [change])
    shutil.copytree(run / "components", copy / "components")
    (copy / "recipe.toml").write_text(config.dump(recipe))
    return Studio(RunDirectory(copy), "cpu")


def test_only_weights_are_loaded_anew(studio: Studio, tiny_run: Path) -> None:
    """Forth and back again: each load makes the same videos as a studio of its own."""
    preset, run = _preset(studio), RunDirectory(tiny_run)
    parts = studio.components
    for step, weights in ((2, "model"), (6, "ema/power"), (2, "model")):
        sampler = studio.load(run.checkpoint_path(step), weights)
        assert (sampler.step, sampler.weights) == (step, weights)
        assert sampler.components is parts
        alone = load_sampler(
            tiny_run,
            step=step,
            ema=weights != "model" and None,
            device="cpu",
            profile=weights.removeprefix("ema/") if weights != "model" else None,
        )
        assert np.array_equal(_video(sampler, preset), _video(alone, preset))


def test_after_a_damaged_checkpoint_the_next_is_loaded(
    studio: Studio, tiny_run: Path, tmp_path: Path
) -> None:
    """A failure says what is wrong, and leaves nothing of it behind."""
    good = RunDirectory(tiny_run).checkpoint_path(4)
    before = _video(studio.load(good, "model"), _preset(studio))
    damaged = shutil.copytree(good, tmp_path / good.name)
    shard = next((damaged / "model").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="is damaged"):
        studio.load(damaged, "model")
    with pytest.raises(CheckpointError, match=r"is damaged|is missing"):
        studio.load(tmp_path / "step_00000009", "model")
    assert np.array_equal(_video(studio.load(good, "model"), _preset(studio)), before)


@pytest.mark.parametrize(
    "change",
    ["model.config.num_blocks=1", "model.config.num_blocks=3", "model.config.hidden_size=96"],
)
def test_a_checkpoint_of_another_model_is_refused(
    change: str, tiny_run: Path, tmp_path: Path
) -> None:
    """Also one that has all that this model wants, and more."""
    studio = _changed(tiny_run, tmp_path / "other", change)
    with pytest.raises(CheckpointError, match="holds another model than the recipe") as caught:
        studio.load(RunDirectory(tiny_run).checkpoint_path(1), "model")
    assert "\n" not in str(caught.value)


def test_weights_of_an_average_that_is_not_there_are_missed(studio: Studio, tiny_run: Path) -> None:
    """By the name of the part."""
    with pytest.raises(CheckpointError, match="ema/none"):
        studio.load(RunDirectory(tiny_run).checkpoint_path(1), "ema/none")


def test_a_size_that_the_model_cannot_divide_names_the_preset_and_the_nearest(
    studio: Studio,
) -> None:
    """Before anything is loaded or sampled."""
    bucket = studio.recipe.data.buckets[0]
    studio.check(_preset(studio))
    with pytest.raises(RecipeError, match=r"^Preset demo: 8 frames of 34x32 .* nearest .* 32x32"):
        studio.check(_preset(studio, bucket=bucket.model_copy(update={"width": 34})))


def test_a_card_that_is_not_there_is_refused(tiny_run: Path) -> None:
    """One by its number, and what is no device at all."""
    number = torch.cuda.device_count()
    with pytest.raises(RecipeError, match=f"no card cuda:{number}: this machine has {number}"):
        Studio(RunDirectory(tiny_run), f"cuda:{number}")
    with pytest.raises(RecipeError, match="'gpu' is no device"):
        Studio(RunDirectory(tiny_run), "gpu")
