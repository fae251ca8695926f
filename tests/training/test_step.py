"""One step: what is random follows from seeds; parts add up to the whole; clips that ranks share.

Run by torchrun, this file is one of two ranks.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tests.build import (
    ALONE,
    QUIET,
    TINY_WAN,
    MakeRecipe,
    Recipes,
    assert_saved_alike,
    events,
    forget_after,
    quiet_session,
    rows,
    saved,
)
from torch import Tensor

from longtake.config import Bucket, ConditioningSection, ParallelSection, Recipe
from longtake.data.batch import Batch
from longtake.data.catalog import Catalog
from longtake.data.loader import Loader
from longtake.data.stages import StagePosition
from longtake.models.base import Defaults
from longtake.models.components import assemble
from longtake.models.text import NO_CAPTION
from longtake.parallel.fsdp import clip_gradients, squares
from longtake.parallel.mesh import join
from longtake.training.build import build_state
from longtake.training.inputs import clips_not_encoded, encode_captions, prepare
from longtake.training.record import Recorder
from longtake.training.session import TrainingState
from longtake.training.step import (
    ComputeTimer,
    apply_update,
    compute_gradients,
    drop_undecodable,
    seed_step,
)
from longtake.training.train import train


def _state(recipe: Recipe) -> TrainingState:
    assert recipe.data.catalog is not None
    captions = Catalog.load(recipe.data.catalog).captions()
    return build_state(quiet_session(recipe), assemble(recipe, captions, None))


def _batches(recipe: Recipe, count: int) -> Iterator[Batch]:
    loader = Loader(recipe.data, batch_size=recipe.training.global_batch_size, seed=recipe.seed)
    return loader.batches(count)


def _norm(state: TrainingState) -> float:
    return float(squares(_gradients(state)).sum().sqrt())


def _gradients(state: TrainingState) -> list[Tensor]:
    return [p.grad for p in state.components.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("scale", [0.0, -20.0])
def test_a_first_loss_above_that_of_predicting_zero_is_said(
    small_recipe: MakeRecipe, scale: float
) -> None:
    """Both micro-batches count; the loss of a release whose velocity is 0 everywhere is equal."""
    recipe = small_recipe("training.micro_batch_size=2")
    state, (batch,) = _state(recipe), _batches(recipe, 1)
    state.components.model.register_forward_hook(lambda module, args, out: out * scale)
    released = recipe.model.model_copy(update={"pretrained": "mine/release"})
    session = quiet_session(recipe.model_copy(update={"model": released}))
    session.run.path.mkdir(parents=True)
    losses = compute_gradients(session, state, batch)
    with Recorder(session, None, 0, {}) as recorder:
        recorder.compare_with_zero(losses, batch)
    said = events(recipe, "first_loss_high")
    assert len(said) == (scale != 0)
    assert all("The first loss of mine/release is" in each["message"] for each in said)
    state.global_step = 1
    assert compute_gradients(session, state, batch).of_zero is None


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_micro_batches_change_no_loss(small_recipe: MakeRecipe, kind: str) -> None:
    curves = []
    for micro in ((), ("training.micro_batch_size=4",), ("training.micro_batch_size=2",)):
        recipe = small_recipe("training.global_batch_size=8", f"optimizer.kind={kind}", *micro)
        state, losses = _state(recipe), []
        for batch in _batches(recipe, 12):
            losses.append(sum(compute_gradients(quiet_session(recipe), state, batch).losses) / 8)
            apply_update(quiet_session(recipe), state, _norm(state), 1.0, batch.position)
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], rel=1e-6, abs=1e-6)
    assert curves[2] == pytest.approx(curves[0], rel=1e-6, abs=1e-6)
    assert curves[0][-1] < 0.9 * curves[0][0]


_SGD = ("optimizer.kind=torch.optim:SGD", "optimizer.schedule=constant", "optimizer.warmup_steps=0")
_ADAM = ("optimizer.fused_backward=true", "optimizer.max_grad_norm=1e9", "optimizer.eps=1e-30")


@pytest.mark.parametrize(
    ("changes", "one", "other"),
    [
        (
            _SGD,
            ("optimizer.learning_rate=0.04", "optimizer.max_grad_norm=0.2"),
            ("optimizer.learning_rate=0.01", "optimizer.max_grad_norm=0.8"),
        ),
        (_ADAM, (), ()),
    ],
    ids=["clipped", "in the backward pass"],
)
def test_the_weight_of_a_catalog_multiplies_its_gradients_and_nothing_that_is_recorded(
    small_recipe: Recipes, changes: tuple[str, ...], one: tuple[str, ...], other: tuple[str, ...]
) -> None:
    """A quarter for one catalog, at four times the rate, is four times as much for the other.

    Clipped are the batches of one catalog alone, whose gradients are four times as large.
    """

    def trained(name: str, weights: dict[str, float], more: tuple[str, ...]) -> Recipe:
        recipe = small_recipe("training.steps=8", *changes, *more, name=name)
        both = dict.fromkeys("ab", recipe.data.catalog)
        update = {"catalog": None, "catalogs": both, "loss_weights": weights}
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=update)})
        train(recipe, QUIET)
        return recipe

    less, more = trained("less", {"a": 0.25}, one), trained("more", {"b": 4.0}, other)
    torch.testing.assert_close(saved(less, 8, "model"), saved(more, 8, "model"))
    keys = ("loss", "grad_norm", "weight_norm")
    np.testing.assert_allclose(rows(less, *keys), rows(more, *keys), rtol=1e-4)
    plain = trained("plain", {}, other)
    assert rows(plain, "weight_norm") != rows(more, "weight_norm")


def test_a_run_with_rules_for_layers_resumes_bitwise(small_recipe: Recipes) -> None:
    rules = "rules=[{layers=['blocks.0.*'], rank=2}, {layers=['to_qkv'], exclude=true}]"
    changes = (
        f"trainable={{kind='lora', rank=4, targets=['blocks.*'], {rules}}}",
        "optimizer.rules=[{layers=['*.lora_B.*'], factor=4.0}]",
        *("training.steps=4", "checkpoint.every=2"),
    )
    straight, parted = (small_recipe.trained(*changes, name=name) for name in ("one", "two"))
    forget_after(parted, 2)
    assert train(parted, QUIET).start_step == 2
    assert_saved_alike(parted, straight, 4)


def _part(batch: Batch, order: list[int]) -> Batch:
    """Some of a batch's samples, in another order, perhaps repeated."""
    return replace(
        batch,
        videos=batch.videos[order],
        captions=tuple(batch.captions[index] for index in order),
        seeds=tuple(batch.seeds[index] for index in order),
        identities=tuple(batch.identities[index] for index in order),
        epochs=tuple(batch.epochs[index] for index in order),
        weights=batch.weights[order],
    )


@pytest.mark.parametrize("default", [0.0, 1.0])
def test_unset_caption_dropout_is_the_familys(small_recipe: MakeRecipe, default: float) -> None:
    recipe = small_recipe()
    (batch,) = _batches(recipe, 1)
    parts = replace(_state(recipe).components, defaults=Defaults(caption_dropout=default))
    captions = [NO_CAPTION] * 4 if default else list(batch.captions)
    told = prepare(batch, parts, recipe, torch.device("cpu")).conditioning
    assert torch.equal(told["token_ids"], parts.text.encode(captions)["token_ids"])
    own = small_recipe("data.caption_dropout=0.0")
    told = prepare(batch, parts, own, torch.device("cpu")).conditioning
    assert torch.equal(told["token_ids"], parts.text.encode(batch.captions)["token_ids"])


@pytest.mark.parametrize("micro", [(), ("training.micro_batch_size=2",)])
def test_stand_ins_change_nothing(small_recipe: MakeRecipe, micro: tuple[str, ...]) -> None:
    """Loss, norm and gradient are those of the smaller batch without them, wherever they lie."""
    recipe = small_recipe("training.global_batch_size=8", "optimizer.max_grad_norm=0.05", *micro)
    (batch,) = _batches(recipe, 1)
    order = [0, 4, 1, 4, 2, 3, 4, 4]  # the fifth stands in for three others
    padded = _part(batch, order)
    padded.weights[[1, 3, 6]] = 0.0
    found = []
    for each in (_part(batch, [0, 1, 2, 3, 4]), padded):
        state = _state(recipe)
        losses = compute_gradients(quiet_session(recipe), state, each).losses
        scale = recipe.training.global_batch_size / 5
        loss_sum = sum(
            weight * loss for weight, loss in zip(each.weights.tolist(), losses, strict=True)
        )
        norm = scale * _norm(state)
        clip_gradients(state.components.model, norm, recipe.optimizer.max_grad_norm, scale)
        found.append((loss_sum, norm, torch.cat([g.flatten() for g in _gradients(state)])))
    (loss, norm, gradient), (same_loss, same_norm, same_gradient) = found
    assert same_loss == pytest.approx(loss, rel=1e-6)
    assert same_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 0.1
    torch.testing.assert_close(same_gradient, gradient, rtol=1e-4, atol=1e-8)


def test_an_update_counts_and_drops_the_gradients(small_recipe: MakeRecipe) -> None:
    recipe = small_recipe("optimizer.warmup_steps=4", "optimizer.learning_rate=1e-3")
    state = _state(recipe)
    name, weight = list(state.components.model.named_parameters())[-1]
    before = weight.detach().clone()
    (batch,) = _batches(recipe, 1)
    compute_gradients(quiet_session(recipe), state, batch)
    rate = apply_update(quiet_session(recipe), state, 1.0, 1.0, batch.position)
    assert rate == pytest.approx(1e-3 / 5)
    assert state.global_step == 1
    assert _gradients(state) == []
    decay = 2 / 11
    torch.testing.assert_close(
        state.ema.states()["main"][name], decay * before + (1 - decay) * weight.detach()
    )
    assert not torch.equal(weight, before)


def test_a_samples_randomness_is_its_own(small_recipe: MakeRecipe) -> None:
    recipe = small_recipe("training.global_batch_size=32", "data.caption_dropout=0.5")
    parts = _state(recipe).components
    (batch,) = _batches(recipe, 1)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist()[:20]
    other = _part(batch, order)
    whole = prepare(batch, parts, recipe, ALONE.device)
    part = prepare(other, parts, recipe, ALONE.device)
    assert torch.equal(part.latents, whole.latents[order])
    assert torch.equal(part.noise, whole.noise[order])
    assert torch.equal(part.sigmas, whole.sigmas[order])
    tokens = whole.conditioning["token_ids"]
    assert torch.equal(part.conditioning["token_ids"], tokens[order])
    assert whole.noise.shape == whole.latents.shape == (32, 3, 8, 32, 32)
    assert abs(whole.noise.mean().item()) < 8e-3
    assert abs(whole.noise.std().item() - 1) < 8e-3
    assert len(set(whole.noise[:, 0, 0, 0, 0].tolist())) == 32
    dropped = (tokens == 0).all(dim=1).sum().item()
    assert 6 <= dropped <= 26  # of 32, at one half: six standard deviations and a half


_ENCODED = (*TINY_WAN, "training.global_batch_size=7")


def test_what_is_encoded_does_not_depend_on_its_neighbours(small_recipe: MakeRecipe) -> None:
    """Bitwise, though convolutions round otherwise in other batches: so it can be cached."""
    recipe = small_recipe(*_ENCODED)
    parts = _state(recipe).components
    (batch,) = _batches(recipe, 1)
    whole = prepare(batch, parts, recipe, ALONE.device)
    pictures = {"pose": batch.videos[:, :, :1], "scene": batch.videos[:, :, 1:2]}
    section = ConditioningSection(kind="picture", path="{stem}.png")
    sections = {"conditioning": dict.fromkeys(pictures, section)}
    given = recipe.model_copy(update={"data": recipe.data.model_copy(update=sections)})
    told = prepare(replace(batch, inputs=pictures), parts, given, ALONE.device).conditioning
    assert told.keys() == {*whole.conditioning, "pose_latents", "scene_latents"}
    for name, picture in pictures.items():
        assert torch.equal(told[f"{name}_latents"][3:4], parts.codec.encode(picture[3:4]))
    for order in ([3], [6, 0], [5, 4, 3, 2, 1, 0]):
        part = prepare(_part(batch, order), parts, recipe, ALONE.device)
        assert torch.equal(part.latents, whole.latents[order])
        embeds = part.conditioning["prompt_embeds"]
        assert torch.equal(embeds, whole.conditioning["prompt_embeds"][order])


def test_latents_from_a_cache_are_taken_as_they_are(small_recipe: MakeRecipe) -> None:
    halves = "training.global_batch_size=6", "training.micro_batch_size=2"
    recipe = small_recipe(*_ENCODED, "data.caption_dropout=0.5", *halves)
    parts = _state(recipe).components
    (batch,) = _batches(recipe, 1)
    expected = prepare(batch, parts, recipe, ALONE.device)
    cached = replace(
        batch,
        videos=batch.videos[:, :, :0],
        latents=expected.latents,
        conditioning=encode_captions(parts.text, batch.captions),
        no_caption=encode_captions(parts.text, [NO_CAPTION]),
    )
    found = prepare(cached, parts, recipe, ALONE.device)
    for name in ("latents", "noise", "sigmas"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    embeds = expected.conditioning["prompt_embeds"]
    assert torch.equal(found.conditioning["prompt_embeds"], embeds)
    assert not torch.equal(embeds, cached.conditioning["prompt_embeds"])
    losses = [
        compute_gradients(quiet_session(recipe), _state(recipe), each).losses
        for each in (batch, cached)
    ]
    assert losses[0] == losses[1]


def test_a_clip_that_one_rank_cannot_decode_is_left_out_by_all_that_share_it(
    run_on_two_ranks: Callable[..., None],
) -> None:
    run_on_two_ranks(__file__)


def _batch(weights: list[float], rejected: tuple[tuple[str, int], ...]) -> Batch:
    size = len(weights)
    return Batch(
        step=7,
        stage="all",
        source="catalog",
        epoch=0,
        begins_epoch=False,
        bucket=Bucket(num_frames=1, height=8, width=8),
        videos=torch.zeros(size, 3, 1, 8, 8, dtype=torch.uint8),
        captions=("",) * size,
        seeds=(0,) * size,
        identities=("ab",) * size,
        epochs=(0,) * size,
        weights=torch.tensor(weights),
        rejected=rejected,
        global_size=size,
        position=StagePosition("all", 7),
        position_before=StagePosition("all", 6),
    )


def _as_one_of_two() -> None:
    with join("cpu", ParallelSection(context=2)) as world:
        assert (world.data_rank, world.data_size) == (0, 1)
        assert world.speaks_for_data == world.is_first
        mine = [_batch([1, 0, 1, 1], (("aa", 1),)), _batch([1, 1, 1, 0], (("bb", 2),))][world.rank]
        batch = drop_undecodable(mine, world)
        assert batch.weights.tolist() == [1, 0, 1, 0]
        assert batch.rejected == (("aa", 1), ("bb", 2))


def test_only_measured_blocks_count_as_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 5.0, 7.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timer = ComputeTimer(torch.device("cpu"))
    for _ in range(2):
        with timer.measure():
            pass
    assert timer.seconds() == 3.0


def _drawn(seed: int, step: int, rank: int) -> tuple[float, float, float]:
    seed_step(seed, step, rank)
    return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: S311 - no secret


def test_what_is_random_in_a_step_follows_from_seed_step_and_rank() -> None:
    """Whatever was drawn before, by all three generators."""
    draws = [_drawn(*each) for each in ((0, 7, 1), (0, 8, 1), (0, 7, 0), (1, 7, 1))]
    assert _drawn(0, 7, 1) == draws[0]
    for generator in zip(*draws, strict=True):
        assert len(set(generator)) == len(draws)


if __name__ == "__main__":
    _as_one_of_two()


def test_a_clip_that_is_encoded_to_nan_is_named_and_no_other(small_recipe: MakeRecipe) -> None:
    recipe = small_recipe(*_ENCODED)
    parts = _state(recipe).components
    (batch,) = _batches(recipe, 1)
    losses = [math.nan, *[1.0] * (len(batch.identities) - 1)]
    found = partial(clips_not_encoded, batch, losses, parts, recipe, ALONE.device)
    assert not [*found()]  # the model's fault
    with torch.no_grad():
        next(parts.text.modules()[0].parameters()).fill_(math.nan)
    ((identity, names),) = found()
    assert identity == batch.identities[0]
    assert "prompt_embeds" in names
    assert "latents" not in names
    with torch.no_grad():
        next(parts.codec.modules()[0].parameters()).fill_(math.nan)
    assert next(found())[1].startswith("latents, ")
