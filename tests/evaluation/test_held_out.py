"""The loss on clips that are not trained on."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from PIL import Image
from tests.data.catalogs import make_catalog

from longtake import config
from longtake.config import Recipe
from longtake.data.catalog import Catalog
from longtake.data.index import index
from longtake.demo.shapes import write_clips
from longtake.errors import DataError, PlanError
from longtake.evaluation import held_out
from longtake.evaluation.held_out import HeldOut
from longtake.models.components import Components
from longtake.models.numerics import Precision
from longtake.models.objective import FlowBatch, flow_losses
from longtake.run_dir import RunDirectory
from longtake.sampling.sampler import Sampler, load_sampler


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unseen")
    captions = write_clips(folder / "clips", num_clips=7, seed=99)
    index([folder / "clips"], captions=captions, out=folder / "catalog.parquet")
    return folder / "catalog.parquet"


@pytest.fixture(scope="module")
def recipe(tiny_recipe: Recipe, unseen: Path) -> Recipe:
    return config.changed(tiny_recipe, [f"evaluation.held_out={unseen}"])


def _sampler(run: Path, step: int) -> Sampler:
    return load_sampler(run, step=step, ema=False, device="cpu")


def _open(recipe: Recipe, run: Path) -> HeldOut:
    return cast("HeldOut", HeldOut.open(recipe, RunDirectory(run)))


def test_the_loss_is_the_same_whatever_the_batch_and_whatever_was_random_before(
    tiny_run: Path, recipe: Recipe
) -> None:
    sampler, clips = _sampler(tiny_run, 6), _open(recipe, tiny_run)
    losses = [clips.loss(sampler, batch_size=size) for size in (1, 3, 8)]
    assert list(losses[0]) == ["0.1", "0.3", "0.5", "0.7", "0.9", "mean"]
    assert losses[0]["mean"] == pytest.approx(sum(list(losses[0].values())[:5]) / 5)
    for each in losses[1:]:
        assert each == pytest.approx(losses[0], rel=1e-5)
    torch.manual_seed(5)
    assert _open(recipe, tiny_run).loss(sampler, batch_size=8) == losses[2]


def test_it_tells_checkpoints_apart_and_falls_as_the_model_learns(
    tiny_run: Path, recipe: Recipe
) -> None:
    clips = _open(recipe, tiny_run)
    early, late = (clips.loss(_sampler(tiny_run, step)) for step in (1, 6))
    assert late["mean"] < early["mean"]
    assert clips.loss(_sampler(tiny_run, 1)) == early


def test_a_model_that_answers_zero_has_the_closed_forms_loss(
    tiny_run: Path, recipe: Recipe
) -> None:
    sampler, clips = _sampler(tiny_run, 6), _open(recipe, tiny_run)
    for weight in sampler.components.model.parameters():
        weight.zero_()
    found = clips.loss(sampler)
    square = sum(float(each.latents.square().mean()) for each in clips.encoded) / 7
    closed = {f"{sigma:g}": square / sigma**2 for sigma in held_out.SIGMAS}
    assert found == pytest.approx({**closed, "mean": sum(closed.values()) / 5}, rel=1e-5)


def test_what_does_not_fit_the_memory_is_computed_in_halves(
    tiny_run: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are the same; where not even one clip fits, that is said."""
    monkeypatch.setattr(held_out, "SIGMAS", (0.5,))
    sampler, clips = _sampler(tiny_run, 6), _open(recipe, tiny_run)
    whole, most = clips.loss(sampler, batch_size=7), [4]

    def small(
        parts: Components, examples: FlowBatch, precision: Precision, device: torch.device
    ) -> torch.Tensor:
        if len(examples.latents) > most[0]:
            raise torch.OutOfMemoryError
        return flow_losses(parts, examples, precision, device)

    monkeypatch.setattr(held_out, "flow_losses", small)
    assert clips.loss(sampler, batch_size=7) == pytest.approx(whole, rel=1e-5)
    most[0] = 0
    with pytest.raises(PlanError, match=r"one held-out clip .* does not fit the memory"):
        clips.loss(sampler, batch_size=1)


def test_a_mask_weighs_the_loss_as_in_training(
    tiny_run: Path, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out, "SIGMAS", (0.5,))
    bucket, found = recipe.data.buckets[0], {}
    for colour, right in (("white", "white"), ("black", "white"), ("none", "black")):
        mask = Image.new("L", (bucket.width, bucket.height), right)
        mask.paste("white" if colour == "white" else "black", (0, 0, bucket.width // 2, 99))
        mask.save(tmp_path / f"{colour}.png")
        face = f"{{kind='mask', path='{tmp_path / colour}.png'}}"
        changes = [f"data.conditioning.face={face}", "flow.loss_mask=face"]
        masked = config.changed(recipe, changes)
        sampler = replace(_sampler(tiny_run, 6), recipe=masked)
        found[colour] = _open(masked, tiny_run).loss(sampler)["mean"]
    plain = _open(recipe, tiny_run).loss(_sampler(tiny_run, 6))["mean"]
    assert found["white"] == plain != found["black"] > found["none"] == 0


def test_clips_that_are_trained_on_are_refused(
    tiny_run: Path, recipe: Recipe, unseen: Path, tmp_path: Path
) -> None:
    (trained,) = (tiny_run / "catalogs").glob("*.parquet")
    clips = [*Catalog.load(unseen).clips(), *list(Catalog.load(trained).clips())[:2]]
    make_catalog(clips).save(tmp_path / "mixed.parquet")
    mixed = config.changed(recipe, [f"evaluation.held_out={tmp_path / 'mixed.parquet'}"])
    with pytest.raises(DataError, match=r"2 of the 9 held-out clips .* are trained on, such as"):
        _open(mixed, tiny_run)


def test_inputs_of_the_objective_are_not_asked_for(tiny_run: Path, recipe: Recipe) -> None:
    given = "{kind='picture', path='worse/{stem}.png'}"
    pairs = config.changed(
        recipe, [f"data.conditioning.worse={given}", "objective.inputs=['worse']"]
    )
    assert _open(pairs, tiny_run).recipe.data.conditioning == {}


def test_a_few_clips_are_enough(tiny_run: Path, recipe: Recipe, unseen: Path) -> None:
    clips = cast("HeldOut", HeldOut.open(recipe, RunDirectory(tiny_run), num_clips=2))
    first = sorted(clip.identity for clip in Catalog.load(unseen).clips())[:2]
    assert [clip.identity for clip, _ in clips.clips] == first


def test_without_a_catalog_there_is_none_and_without_usable_clips_that_is_said(
    tiny_run: Path, tiny_recipe: Recipe, recipe: Recipe, tmp_path: Path
) -> None:
    assert HeldOut.open(tiny_recipe, RunDirectory(tiny_run)) is None
    longer = config.changed(recipe, ["data.buckets=[{num_frames=9, height=32, width=32}]"])
    with pytest.raises(DataError, match=r"Of the 7 held-out clips .* none has a caption and is"):
        _open(longer, tiny_run)
    missing = config.changed(recipe, [f"evaluation.held_out={tmp_path / 'none.parquet'}"])
    with pytest.raises(DataError, match="does not exist"):
        _open(missing, tiny_run)
